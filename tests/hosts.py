"""Several hosts on one machine: network namespaces with cables between them, and a run over these hosts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import echelon
from echelon.runs.metrics import read_rows
from running import DEADLINE_S, TESTS, Running, processes_marked, wait_until

NEAR, FAR, THIRD = "10.9.8.1", "10.9.8.2", "10.9.8.3"
SECRET = "a secret for the tests of several hosts"
SOLVED, SOLVE_S = 475.0, 240.0  # return of CartPole-v1, and the longest time until then
UNTIL_SOLVED = {"minutes": SOLVE_S / 60 + 1, "evaluation.interval-s": 3, "evaluation.episodes": 10}
ENDLESS = 10**9  # steps
Words = tuple[str, ...]


def name_of(process: subprocess.Popen[Any]) -> str:
    """What it runs: the holder of a namespace is made when it does nothing but sleep."""
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:  # it ended meanwhile
        return ""


def as_another_host(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)


@contextmanager
def made_hosts(num: int = 2) -> Iterator[list[tuple[str, ...]]]:
    """What to put before a command to run it on each host: `NEAR`, `FAR` and so on.

    The near one has the hub, to which cable0 goes from the first of the others, cable1 from the second.
    """
    if missing := [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]:
        pytest.skip(f"network namespaces need {', '.join(missing)}")
    holders = []
    try:
        outer = subprocess.Popen(["unshare", "-rn", "sleep", "900"], stderr=subprocess.PIPE)
        holders.append(outer)
        wait_until(lambda: outer.poll() is not None or name_of(outer) == "sleep", "it left ours and may do as it likes")
        into = ("nsenter", "-t", str(outer.pid), "-U", "--preserve-credentials", "-n")
        made = as_another_host(*into, "ip", "link", "add", "hub", "type", "bridge")
        if made.returncode != 0:
            pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
        commands = [
            (*into, "ip", "addr", "add", f"{NEAR}/24", "dev", "hub"),
            (*into, "ip", "link", "set", "hub", "up"),
            (*into, "ip", "link", "set", "lo", "up"),
        ]
        hosts = [into]
        for number, address in enumerate((FAR, THIRD)[: num - 1]):
            inner = subprocess.Popen([*into, "unshare", "-n", "sleep", "900"])
            holders.append(inner)
            wait_until(lambda inner=inner: name_of(inner) == "sleep", "there was another one")  # type: ignore[misc]
            far = ("nsenter", "-t", str(inner.pid), "-U", "--preserve-credentials", "-n")
            near, end, there = f"cable{number}", f"end{number}", str(inner.pid)
            commands += [
                (*into, "ip", "link", "add", near, "type", "veth", "peer", "name", end, "netns", there),
                (*into, "ip", "link", "set", near, "master", "hub", "up"),
                (*far, "ip", "addr", "add", f"{address}/24", "dev", end),
                (*far, "ip", "link", "set", end, "up"),
                (*far, "ip", "link", "set", "lo", "up"),
            ]
            hosts.append(far)
        for command in commands:
            done = as_another_host(*command)
            assert done.returncode == 0, (command, done.stderr)
        yield hosts
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def set_cable(hosts: list[Words], state: str, number: int = 0) -> None:
    """Cuts or mends the cable of a host: "down" or "up"."""
    done = as_another_host(*hosts[0], "ip", "link", "set", f"cable{number}", state)
    assert done.returncode == 0, done.stderr


@contextmanager
def bad_cable(hosts: list[Words], delay_ms: float, loss: float) -> Iterator[None]:
    """Replaces the cable of the first other host by one that delays packets in each direction, and loses some."""
    near, far = hosts[:2]
    assert as_another_host(*near, "ip", "link", "delete", "cable0").returncode == 0
    program = [sys.executable, str(TESTS / "bad_cable.py"), "cable0", "end0", str(delay_ms), str(loss)]
    with subprocess.Popen([*near, *program], stdout=subprocess.PIPE, text=True) as cable:
        try:
            assert cable.stdout is not None
            if not cable.stdout.readline():
                pytest.skip("TAP devices cannot be made here")
            for command in (
                (*near, "ip", "link", "set", "end0", "netns", far[2]),
                (*near, "ip", "link", "set", "cable0", "master", "hub", "up"),
                (*far, "ip", "addr", "add", f"{FAR}/24", "dev", "end0"),
                (*far, "ip", "link", "set", "end0", "up"),
            ):
                done = as_another_host(*command)
                assert done.returncode == 0, (command, done.stderr)
            yield
        finally:
            cable.terminate()
            print(f"measured: {cable.communicate()[0].strip()}")


def network_of(pid: int | str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # it ended; a zombie has none either
        return ""


def processes_of(host: Words) -> list[int]:
    """The processes of a host, without the one that holds its network."""
    network = network_of(host[2])
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if network and pid != int(host[2]) and network_of(pid) == network]


def kill_host(host: Words) -> None:
    """Ends all processes of a host at once, as when its machine loses power."""
    while pids := processes_of(host):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def two_hosts() -> Iterator[list[tuple[str, ...]]]:
    with made_hosts() as hosts:
        yield hosts


class Site:
    """A head and an agent, each with shared memory of its own, over the loopback or between two hosts."""

    def __init__(self, folder: Path, shm_dir: Path) -> None:
        self.folder, self.shm_dir, self.started = folder, shm_dir, list[Running]()

    def head(
        self, preset: str, before: Words = (), address: str = "127.0.0.1", env: str = "CartPole-v1", **options: object
    ) -> Running:
        """Four actors on two hosts."""
        settings = {
            "steps": ENDLESS, "actor.envs": 8, "evaluation.episodes": 0, "engine": "hosts", "hosts": 2, "actors": 4,
            "acting": "local",
            "hosts.address": f"tcp://{address}:0", "run-dir": self.folder / "run", "shm-dir": self.memory("head"),
            **options,
        }  # fmt: skip
        if env == "CartPole-v1" and settings["steps"] == ENDLESS:  # leaves the processor to the tests beside it
            settings = {"env.wrappers": "unruly:Unhurried", **settings}
        if "max-actors" in options:
            del settings["actors"]
        words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in settings.items()]
        return self._start("run", "head", "train", preset, env, *words, before=before)

    def agent(self, head: Running, before: Words = (), name: str = "second", *, fresh: bool = False) -> Running:
        head.until(lambda: "host --join " in head.text(), "agents may join")
        join = head.text().partition("host --join ")[2].split()[0]
        memory = self.memory(name)
        words = ("host", f"--join={join}", f"--name={name}", f"--shm-dir={memory}")
        return self._start(name, name, *words, before=before, fresh=fresh)

    def resume(self, head: Running, hosts: int, steps: int) -> Running:
        return self._start(
            "run", "head", "resume", str(head.run_dir), f"--hosts={hosts}", f"--steps={steps}", before=()
        )

    def memory(self, name: str) -> Path:
        memory = self.shm_dir / name
        memory.mkdir(exist_ok=True)
        return memory

    def _start(self, output: str, memory: str, *words: str, before: Words, fresh: bool = False) -> Running:
        self.started.append(Running(self.folder / output, self.memory(memory), *words, before=before, fresh=fresh))
        return self.started[-1]

    def close(self) -> None:
        for one in self.started:
            one.close()
            logs = one.text().partition("the logs of its roles are in ")[2].split()  # of an agent that was killed
            shutil.rmtree(logs[0] if logs else "", ignore_errors=True)


@pytest.fixture
def site(tmp_path: Path, shm_dir: Path) -> Iterator[Site]:
    site = Site(tmp_path, shm_dir)
    yield site
    site.close()


def gone(agent: Running) -> None:
    """Nothing is left of an agent and its roles."""
    wait_until(lambda: not processes_marked(agent.mark), lambda: f"no process is left of\n{agent.text()}")
    wait_until(lambda: not list(agent.shm_dir.iterdir()), "shared memory is empty")


def far_actors_act(head: Running, num_actors: int = 4) -> None:
    for index in (2, 3):
        head.until_acting(index, num_actors)


def until_divided(head: Running, hosts: list[str | None]) -> None:
    """Waits until every actor acts at its place."""
    head.until(lambda: places(head, len(hosts)) == hosts, f"the actors are on {hosts}")
    for index, host in enumerate(hosts):
        if host is not None:
            head.until_acting(index, len(hosts))


def places(head: Running, num_actors: int) -> list[str | None]:
    """The hosts of the actors, "" for the head and None for an actor that does not run."""
    try:
        record = json.loads((head.run_dir / "processes.json").read_text())
    except FileNotFoundError:
        return []
    return [record.get(f"actor-{index}", {"host": None}).get("host", "") for index in range(num_actors)]


def counted(head: Running, num_actors: int = 4) -> list[int]:
    """The steps of each actor that the head has counted, in a run with replay."""
    [segment] = head.shm_dir.glob("echelon-*/tally")
    words = np.fromfile(segment, np.int64, 8 * (2 + num_actors)).reshape(-1, 8)  # those of the run and learner first
    return [int(steps) for steps in words[2:, 0]]


def when_quiet(count: Callable[[], list[int]]) -> list[int]:
    """What `count` returns when it changes no more."""
    seen: list[list[int]] = []

    def is_quiet() -> bool:
        seen.append(count())
        time.sleep(0.3)
        return count() == seen[-1]

    wait_until(is_quiet, "nothing changes")
    return seen[-1]


def with_version(folder: Path, version: str) -> Path:
    """A folder to import from, where Echelon has another version."""
    package = folder / "echelon"
    package.mkdir(parents=True)
    for part in Path(echelon.__file__).parent.iterdir():
        if part.name != "version.py":
            (package / part.name).symlink_to(part)
    (package / "version.py").write_text(f'__version__ = "{version}"\n')
    return folder


def until_solved(head: Running) -> None:
    """Waits for a greedy evaluation that solves CartPole.

    The returns of the actors themselves do not show it: those of apex-dqn explore, and stay at 450 when the greedy
    policy is at 500.
    """

    def is_solved() -> bool:
        rows = read_rows(head.run_dir) if (head.run_dir / "metrics.jsonl").exists() else []
        return any(row["kind"] == "evaluation" and row["return_mean"] >= SOLVED for row in rows)

    head.until(is_solved, "CartPole is solved", SOLVE_S)
