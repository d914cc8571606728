"""The agent as its user sees it: a process that joins a head, which is spoken by the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.engines.process import Exit, ProcessSpec
from echelon.hosts.engine import HostsEngine
from echelon.hosts.messages import Assignment
from echelon.hosts.quorum import Quorum
from echelon.transport.shared_memory import SlotRing
from echelon.transport.slot_wire import SlotBytes
from running import Running, processes_marked, wait_until

SLOT = SlotBytes(64)
INTERRUPTED = """
import signal, sys
from echelon.hosts.agent import take_part

class Frame:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

def report(text):
    print(text, flush=True)
    if "takes part" in text:
        Frame()

print(take_part(*sys.argv[1:], report))
"""


class Head:
    """The engine of a head without a run, and the agents that join it."""

    def __init__(self, folder: Path, shm_dir: Path, lease_s: float = 60.0, address: str = "tcp://127.0.0.1:0") -> None:
        self.folder, self.shm_dir, self.texts = folder, shm_dir, list[str]()
        self.session = shm_dir / f"head-{len(list(shm_dir.iterdir()))}"
        self.session.mkdir()
        self.engine = HostsEngine(str(self.session), ("json",), address, lease_s)
        self.agents: list[Running] = []

    def agent(self, name: str = "second") -> Running:
        memory = self.shm_dir / name
        memory.mkdir(exist_ok=True)
        join = self.engine.address.removeprefix("tcp://")
        words = ("host", f"--join={join}", f"--name={name}", f"--shm-dir={memory}", f"--status-file={memory}.status")
        self.agents.append(Running(self.folder / name, memory, *words))
        return self.agents[-1]

    def gather(self, num_hosts: int) -> threading.Thread:
        """Waits for hosts in the background, of which each has one actor."""
        file = self.session / "carrier.address"
        file.write_text("tcp://127.0.0.1:9")
        assignment = Assignment(streams=num_hosts, slots=2, weights=8, slot=SLOT.to_wire())
        counts = SlotRing(self.session, SLOT, num_hosts, 2)
        arguments = (assignment, Quorum(num_hosts), counts, file, self.texts.append, lambda: None)
        thread = threading.Thread(target=self.engine.gather, args=arguments)
        thread.start()
        return thread

    def start(self, agent: Running, entry: str, **config: object) -> None:
        """Gathers the one other host and has it start its actor."""
        self.gather(2).join(60.0)
        spec = ProcessSpec("actor-1", entry, {"file": str(self.folder / "actor"), "steps": 0, **config})
        self.engine.start(spec)
        self.until(lambda: "takes part with 1 actor" in agent.text() and (self.engine.pid("actor-1") or self.exits))

    exits: tuple[Exit, ...] = ()

    def until(self, condition: object) -> None:
        assert callable(condition)

        def look() -> bool:
            self.exits += tuple(self.engine.exits())
            return bool(condition())

        wait_until(look, lambda: "\n".join(agent.text() for agent in self.agents))


@pytest.fixture
def head(tmp_path: Path, shm_dir: Path) -> Iterator[Head]:
    head = Head(tmp_path, shm_dir)
    yield head
    head.engine.close(0.0)
    for agent in head.agents:
        agent.close()


def test_a_host_that_leaves_while_others_are_missing_leaves_its_place(head: Head) -> None:
    thread = head.gather(3)
    first = head.agent("first")
    first.until(lambda: "as first; waiting for 1 more host" in first.text(), "it waits")
    first.process.send_signal(signal.SIGINT)
    assert first.code() == 0 and "left: the run waits for another host" in first.text()
    for name in ("second", "third"):
        head.agent(name)
    thread.join(60.0)
    assert not thread.is_alive() and "host first left: it was stopped" in head.texts
    assert {head.engine.place(f"actor-{index}") for index in (1, 2)} == {"second", "third"}


def test_an_agent_whose_role_failed_the_run_says_so(head: Head) -> None:
    agent = head.agent()
    head.start(agent, "engine_roles:Raising", message="no such robot")
    head.until(lambda: head.exits)
    assert head.exits[0].failure is not None
    head.engine.close(0.0)
    assert agent.code() == 1, agent.text()
    assert "the run is over: actor-1 of this host failed: ValueError: no such robot" in agent.text()
    logs = Path(agent.text().partition("logs kept in ")[2].strip().splitlines()[0])
    assert "no such robot" in (logs / "actor-1.log").read_text()
    os.utime(logs, (0, 0))  # what is older than a day goes when the next agent starts
    late = head.agent("late")
    late.until(lambda: "waiting for the run" in late.text(), "it waits")
    assert not logs.exists()
    late.process.send_signal(signal.SIGINT)
    assert late.code() == 0 and "left: no run was joined" in late.text()


def test_an_agent_that_has_no_role_yet_leaves_when_the_run_ends(head: Head) -> None:
    agent = head.agent()
    head.gather(2).join(60.0)
    (head.session / "carrier.address").unlink()  # as if the carrier were still starting
    head.until(lambda: "as second; the run is starting" in agent.text())
    head.engine.close(0.0)
    assert agent.code() == 0 and "left: the run is over" in agent.text(), agent.text()


def test_an_interrupted_agent_says_what_it_does(head: Head) -> None:
    agent, status = head.agent(), head.shm_dir / "second.status"
    head.until(status.exists)
    assert status.read_text() == "waiting\n"
    head.start(agent, "engine_roles:Counting")
    assert status.read_text() == "joined\n"
    agent.process.send_signal(signal.SIGINT)
    head.until(lambda: agent.process.poll() is not None)
    assert agent.code() == 0 and not status.exists()
    assert "leaving: ending 1 actor (Ctrl-C again: leave immediately)" in agent.text()
    assert "left: the run goes on without this host" in agent.text()
    assert ("message", "host second left: it was stopped; this host takes actor 1") in head.engine.reports()


def test_a_signal_that_comes_while_a_frame_is_released_is_not_lost(head: Head) -> None:
    """pyzmq handles signals there, in a finalizer, where Python ignores what a handler raises."""
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    words = [sys.executable, "-c", INTERRUPTED, head.engine.address, str(head.shm_dir)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as agent:
        try:
            head.gather(2).join(60.0)
            head.until(lambda: agent.poll() is not None)
        finally:
            agent.kill()
        assert agent.stdout is not None and "\nleaving\n" in agent.stdout.read() and agent.returncode == 0


def test_an_agent_that_is_interrupted_twice_still_says_goodbye(head: Head) -> None:
    agent = head.agent()
    head.start(agent, "engine_roles:Counting")
    agent.process.send_signal(signal.SIGINT)
    agent.until(lambda: "leaving" in agent.text(), "it leaves")
    agent.process.send_signal(signal.SIGINT)
    texts: list[str] = []
    head.until(lambda: texts.extend(text for _, text in head.engine.reports()) or texts)
    assert texts == ["host second left: it was stopped; this host takes actor 1"]
    wait_until(lambda: not processes_marked(agent.mark), "nothing is left of it")


def test_an_agent_that_was_suspended_says_so(tmp_path: Path, shm_dir: Path) -> None:
    head = Head(tmp_path, shm_dir, lease_s=1.0)
    agent = head.agent()
    head.start(agent, "engine_roles:Counting")
    agent.process.send_signal(signal.SIGSTOP)
    head.until(lambda: any("is lost (silent for" in text for _, text in head.engine.reports()))
    agent.process.send_signal(signal.SIGCONT)
    head.until(lambda: agent.process.poll() is not None)
    assert agent.code() == 1 and "was suspended for" in agent.text() and "ECHELON_SECRET" not in agent.text()
    head.engine.close(0.0)


def test_an_agent_of_a_head_that_was_killed_says_so(tmp_path: Path, shm_dir: Path) -> None:
    head = Head(tmp_path, shm_dir, lease_s=1.0)
    agent = head.agent()
    head.start(agent, "engine_roles:Counting")
    head.engine._control.close()  # nobody is told
    assert agent.code() == 1 and "has not replied for" in agent.text(), agent.text()
    assert "run `echelon host --join` again" in agent.text() and "Start it" not in agent.text()
    head.engine.close(0.0)


def test_an_agent_of_a_head_that_was_restarted_says_so(tmp_path: Path, shm_dir: Path) -> None:
    head = Head(tmp_path, shm_dir)
    agent = head.agent()
    head.start(agent, "engine_roles:Counting")
    head.engine._control.close()
    successor = Head(tmp_path, shm_dir, address=head.engine.address)
    wait_until(lambda: successor.engine.exits() or agent.process.poll() is not None, "the agent is refused")
    assert agent.code() == 1 and "the run was restarted after this host joined" in agent.text(), agent.text()
    for one in (head, successor):
        one.engine.close(0.0)
