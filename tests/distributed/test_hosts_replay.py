"""Runs with replay over two hosts: what actors of both bring is stored and counted at the head, whoever is killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from echelon.replay.restore import read_header
from hosts import NEAR, SECRET, Site, counted, far_actors_act, gone, made_hosts, set_cable, when_quiet
from running import Running

TRAJECTORY, ENVS = 4, 4
FIELDS: dict[str, Any] = {
    "actor.envs": ENVS,
    "actor.trajectory": TRAJECTORY,
    "network.hidden": 16,
    "replay.min-size": 200,
    "replay.batch": 32,
    "replay.samples-per-insert": 4,
    "replay.capacity": 1_000_000,  # nothing is evicted
    "replay.checkpoint": "true",
}


def stored(run: Running) -> list[int]:
    """The transitions of each actor that the newest snapshot has counted."""
    inserted: list[int] = read_header(max((run.run_dir / "replay").glob("step_????????????")))["limiter"]["inserted"]
    return inserted


def test_whoever_is_killed_no_step_is_counted_twice_and_the_replay_stays(site: Site) -> None:
    endless = {"env": "toy_envs:CounterEnv", "env-kwargs": '{"length": 1000000000}', "algorithm.reward-clip": 1}
    head = site.head("apex-dqn", **FIELDS, **endless, **{"hosts.lease-s": 4.0})
    agent = site.agent(head)
    far_actors_act(head)
    for name in ("carrier", "actor-2", "carrier"):
        pid = head.kill(name)
        assert head.pid(name, besides=pid)
        far_actors_act(head)
    agent.process.send_signal(signal.SIGSTOP)  # no further slot comes
    received = when_quiet(lambda: head.heads(4)[2:])  # first: the count is compared with what has come
    assert counted(head)[2:] == [slots * TRAJECTORY * ENVS for slots in received], "each slot counts once"
    inserted = head.rows()[-1]["replay.inserted"]
    os.kill(agent.process.pid, signal.SIGKILL)
    gone(agent)
    head.until(lambda: "host second is lost (silent for" in head.text(), "the head gives the host up")
    before = counted(head)
    head.until(lambda: all(now > then for now, then in zip(counted(head), before, strict=True)), "all act at the head")
    late = site.agent(head, name="late")  # its actors continue the streams of the head
    head.until(lambda: "late takes actors" in head.text(), "it takes actors")
    slots = head.heads(4)
    head.until(lambda: sum(head.heads(4)) >= sum(slots) + 20, "what they bring is stored")
    summary = head.stop()
    assert late.code() == 0, late.text()
    replay = summary["replay"]
    assert summary["restarts"] == 4 and replay["size"] == replay["inserted"] >= inserted, "nothing is lost"
    incomplete = 12 * ENVS * (TRAJECTORY + 3)  # transitions that the actors which ended had begun
    assert abs(summary["env_steps"] - replay["inserted"]) <= incomplete, "a step is counted once, wherever it was made"
    assert abs(4 * (replay["inserted"] - 200) - replay["sampled"]) <= 2 * (32 + 4 * 4 * ENVS * (TRAJECTORY + 2))
    kept = stored(head)
    assert min(kept) > 0
    again = site.resume(head, hosts=1, steps=summary["env_steps"] + 500)
    assert again.code() == 0, again.text()
    assert f"replay: restored the {sum(kept):,} transitions" in again.text()
    assert again.summary()["replay"]["inserted"] > sum(kept)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("dqn", "CartPole-v1"),
        ("qr-dqn", "CartPole-v1"),
        ("sac", "Pendulum-v1"),
        ("td3", "Pendulum-v1"),
        ("apex-ddpg", "Pendulum-v1"),
    ],
)
def test_every_rule_with_replay_learns_from_the_actors_of_both_hosts(site: Site, name: str, env: str) -> None:
    head = site.head(name, env=env, **FIELDS)
    agent = site.agent(head)
    far_actors_act(head)
    head.until(lambda: min(counted(head)) > 1_000, "no actor is left out")
    summary = head.stop()
    assert summary["restarts"] == 0 and summary["replay"]["samples_per_insert"] == pytest.approx(4.0, rel=0.1)
    assert min(stored(head)) > 900 and agent.code() == 0, agent.text()


@pytest.mark.full
@pytest.mark.parametrize("name", ["dqn", "apex-dqn"])
def test_two_hosts_solve_cartpole(site: Site, name: str) -> None:
    head = site.head(
        name,
        **{"until-return": 475, "steps": 100_000, "evaluation.interval-s": 3, "evaluation.episodes": 10, "actors": 2},
    )
    agent = site.agent(head)
    assert head.process.wait(600) == 0 and agent.code() == 0, (head.text(), agent.text())
    assert head.summary()["status"] == "solved", head.text()


@pytest.mark.full
def test_a_link_that_is_cut_and_a_learner_that_is_killed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_SECRET", SECRET)
    with made_hosts() as hosts:
        near, far = hosts
        head = site.head("apex-dqn", before=near, address=NEAR, **FIELDS, **{"run.checkpoint-interval-s": 0.5})
        agent = site.agent(head, before=far)
        far_actors_act(head)
        set_cable(hosts, "down")
        before = counted(head)
        head.until(lambda: all(now > then + 2_000 for now, then in zip(counted(head)[:2], before, strict=False)), "go")
        head.kill("learner")
        head.until(lambda: "the learner resumes from" in head.text(), "the learner is restored")
        head.until_learning()
        slots = head.heads(4)
        set_cable(hosts, "up")
        far_actors_act(head)
        assert sum(slots[2:]) < sum(head.heads(4)[2:]) and head.stop()["restarts"] == 1
        assert agent.code() == 0, agent.text()
