"""Central acting over two hosts: each has an inference server near its actors, which may fail, as may its host."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from hosts import Site, far_actors_act, gone

CENTRAL: dict[str, Any] = {"acting": "central", "network.hidden": 16}
REPLAY = {"actor.trajectory": 4, "replay.min-size": 200, "replay.batch": 32, "replay.samples-per-insert": 4}


def test_each_host_has_a_server_and_the_bound_on_the_lag_holds(site: Site) -> None:
    """With one pass over each batch and no lag, the learner recomputes what the servers said, memory included."""
    once = {"actor.trajectory": 16, "algorithm.epochs": 1, "algorithm.minibatches": 1, "optimizer.learning-rate": 0.02}
    memory = {"network.core": "lstm", "network.core-size": 16}
    head = site.head("ppo", **CENTRAL, **once, **memory)
    agent = site.agent(head)
    names = {"inference-0", "inference-1"}
    head.until(
        lambda: any(all(row.get(f"inference.{name}.rounds", 0) > 0 for name in names) for row in head.rows()),
        "both servers have replied",
    )
    summary = head.stop()
    assert agent.code() == 0, agent.text()
    assert (summary["lag_max"], summary["dropped"], summary["restarts"]) == (0, 0, 0)
    assert set(summary["inference"]) == names
    divergences = [abs(row["kl"]) for row in head.rows() if "kl" in row]
    assert divergences and max(divergences) < 1e-6
    gone(agent)


@pytest.mark.parametrize("preset", ["impala", pytest.param("apex-dqn", marks=pytest.mark.full)])
def test_a_server_is_replaced_on_its_host_and_ends_with_it(site: Site, preset: str) -> None:
    replay = REPLAY if preset == "apex-dqn" else {}
    head = site.head(preset, **CENTRAL, **replay, **{"hosts.lease-s": 1.0})
    agent = site.agent(head)
    far_actors_act(head)
    actors = [head.pid("actor-2"), head.pid("actor-3")]
    for name in ("inference-1", "inference-0"):
        pid = head.kill(name)
        assert head.pid(name, besides=pid)
        far_actors_act(head)
        head.until_learning()
    assert [head.pid("actor-2"), head.pid("actor-3")] == actors, "they waited"
    os.kill(agent.process.pid, signal.SIGKILL)
    gone(agent)
    head.until(lambda: "host second is lost (silent for" in head.text(), "the head gives the host up")
    head.until_learning()
    assert "inference-1" not in head.processes()
    late = site.agent(head, name="late")
    assert head.pid("inference-2"), "a host that joins later has a server, too"
    head.until(lambda: head.rows()[-1].get("inference.inference-2.rounds", 0) > 0, "it replies")
    head.stop()
    assert late.code() == 0, late.text()


@pytest.mark.full
@pytest.mark.parametrize("preset", ["impala", "apex-dqn"])
def test_two_hosts_solve_cartpole_with_central_acting(site: Site, preset: str) -> None:
    goal = {"until-return": 475, "steps": 400_000, "evaluation.interval-s": 3, "evaluation.episodes": 10, "actors": 2}
    head = site.head(preset, **{"acting": "central", **goal})
    agent = site.agent(head)
    assert head.process.wait(600) == 0 and agent.code() == 0, (head.text(), agent.text())
    assert head.summary()["status"] == "solved", head.text()
