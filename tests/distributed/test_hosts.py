"""A run over two hosts: what comes out is the same, and each of them, and the link, may fail."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hosts import FAR, NEAR, as_another_host, made_hosts
from running import DEADLINE_S, Running, has_torch, parent_of, processes_marked, train_shortly, wait_until

SECRET = "a secret for the tests of two hosts"
Words = tuple[str, ...]


class Site:
    """A head and an agent, each with shared memory of its own, over the loopback or between two hosts."""

    def __init__(self, folder: Path, shm_dir: Path) -> None:
        self.folder, self.shm_dir, self.started = folder, shm_dir, list[Running]()

    def head(self, preset: str, before: Words = (), address: str = "127.0.0.1", **options: object) -> Running:
        """Four actors on two hosts."""
        settings = {
            "steps": 10**9, "actor.envs": 8, "evaluation.interval-s": 0, "engine": "hosts", "hosts": 2, "actors": 4,
            "hosts.address": f"tcp://{address}:0", "run-dir": self.folder / "run", "shm-dir": self.memory("head"),
            **options,
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in settings.items()]
        return self._start("run", "head", "train", preset, "CartPole-v1", *words, before=before)

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
    wait_until(lambda: not processes_marked(agent.mark), f"no process is left of\n{agent.text()}")
    wait_until(lambda: not list(agent.shm_dir.iterdir()), "shared memory is empty")


def far_actors_act(head: Running, num_actors: int = 4) -> None:
    for index in (2, 3):
        head.until_acting(index, num_actors)


def test_two_hosts_learn_what_one_does(site: Site, tmp_path: Path) -> None:
    changes = {"stop.steps": 6_000, "actor.num_actors": 4, "actor.envs": 8, "seed": 3}
    (tmp_path / "near").mkdir()
    near = train_shortly(tmp_path / "near", site.memory("near"), "ppo", "inline", **changes)
    head = site.head("ppo", steps=6_000, seed=3)
    agent = site.agent(head)
    assert head.code() == 0 and agent.code() == 0, (head.text(), agent.text())
    assert head.summary()["weights_sha256"] == near["weights_sha256"]
    assert head.summary()["restarts"] == 0 and head.summary()["lag_max"] == 0
    assert [(host["actors"], host["lost"]) for host in head.summary()["hosts"]] == [(2, ""), (2, "")]
    assert "second 2 actors" in head.text()
    assert "left: the run is over" in agent.text()
    head.assert_nothing_left()
    gone(agent)


def test_an_agent_that_is_killed_loses_its_actors_to_the_other_host(site: Site) -> None:
    head = site.head("impala", **{"hosts.lease-s": 1.0})
    agent = site.agent(head)
    far_actors_act(head)
    assert head.text().count("host second has actors 2 and 3") == 1
    os.kill(agent.process.pid, signal.SIGKILL)
    began = time.monotonic()
    gone(agent)
    head.until(lambda: "host second is lost (silent for" in head.text(), "the head gives the host up")
    far_actors_act(head)
    print(f"measured: its actors act on the head {time.monotonic() - began:.2f} s after the agent was killed")
    late = site.agent(head, name="late")
    assert late.code() == 1 and "the run has all of its hosts already" in late.text()
    assert head.stop()["restarts"] == 1


def test_roles_and_fork_servers_of_either_host_are_replaced(site: Site) -> None:
    head = site.head("impala", **{"run.checkpoint-interval-s": 0.5})
    agent = site.agent(head)
    far_actors_act(head)
    head.kill("carrier")
    far_actors_act(head)
    pid = head.kill("actor-2")  # its number is that of this machine, too
    assert head.pid("actor-2", besides=pid)
    far_actors_act(head)
    server = parent_of(head.pid("actor-2"))
    assert server in processes_marked(agent.mark)
    os.kill(server, signal.SIGKILL)
    head.until(lambda: f"the fork server (process {server}) was ended by SIGKILL" in head.text(), "it is told")
    far_actors_act(head)
    head.kill("learner")
    head.until(lambda: "the learner resumes from" in head.text(), "the learner is restored")
    far_actors_act(head)
    assert head.stop()["restarts"] == 4
    assert agent.code() == 0, agent.text()
    gone(agent)


def test_an_agent_works_without_torch_and_interrupted_gives_its_actors_back_at_once(site: Site) -> None:
    head = site.head("impala")
    agent = site.agent(head, fresh=True)
    far_actors_act(head)
    assert has_torch(head.pid("learner")) and not has_torch(agent.process.pid)
    agent.process.send_signal(signal.SIGINT)
    head.until(lambda: "host second left: it was stopped" in head.text(), "it says goodbye")
    gone(agent)
    far_actors_act(head)
    assert head.stop()["restarts"] == 1


def test_a_head_that_is_killed_ends_everybody_and_may_go_on_alone(site: Site) -> None:
    head = site.head("impala", **{"hosts.lease-s": 1.0, "run.checkpoint-interval-s": 0.2})
    agent = site.agent(head)
    head.until(lambda: list((head.run_dir / "checkpoints").glob("step_*")), "there is a checkpoint")
    far_actors_act(head)
    head.process.kill()
    assert agent.code() == 1
    assert "has not replied for" in agent.text() and "has ended its actors" in agent.text()
    gone(agent)
    (head.run_dir / "processes.json").unlink(missing_ok=True)
    alone = site.resume(head, hosts=1, steps=head.rows()[-1]["env_steps"] + 20_000)
    assert alone.code() == 0, alone.text()
    alone.assert_nothing_left()


def test_a_link_that_is_cut_heals_without_a_restart(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_SECRET", SECRET)
    with made_hosts() as (near, far):
        head = site.head("impala", before=near, address=NEAR)
        agent = site.agent(head, before=far)
        assert NEAR != FAR
        far_actors_act(head)
        assert as_another_host(*near, "ip", "link", "set", "cable0", "down").returncode == 0
        before = head.heads(4)
        time.sleep(4.0)  # a time that TCP and ZeroMQ notice
        head.until_learning()
        assert sum(head.heads(4)[2:]) <= sum(before[2:]) + 4, "nothing came"
        assert as_another_host(*near, "ip", "link", "set", "cable0", "up").returncode == 0
        began = time.monotonic()
        far_actors_act(head)
        print(f"measured: far actors act {time.monotonic() - began:.2f} s after the link is there again")
        assert head.stop()["restarts"] == 0
        assert agent.process.wait(DEADLINE_S) == 0, agent.text()


def test_another_secret_is_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_SECRET", SECRET)
    head = site.head("impala")
    head.until(lambda: "waiting for 1 more host" in head.text(), "it waits")
    monkeypatch.setenv("ECHELON_SECRET", "quite another secret, as it is")
    agent = site.agent(head)
    assert agent.code() == 1 and "ECHELON_SECRET" in agent.text()
    head.process.send_signal(signal.SIGINT)
    assert head.code() == 130
    head.assert_nothing_left()
