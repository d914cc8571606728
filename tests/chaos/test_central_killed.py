"""Central acting under fire: servers and actors are killed and stopped, and the others go on."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from running import Running, Runs

CENTRAL = {"acting": "central"}


def stop(run: Running) -> dict[str, Any]:
    """Ends a run as a user does."""
    run.process.send_signal(signal.SIGINT)
    assert run.code() == 0, run.text()
    run.assert_nothing_left()
    return run.summary()


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_killed_inference_server_is_replaced_while_its_actors_wait(runs: Runs, core: str) -> None:
    run = runs.train(**CENTRAL, **{"network.core": core})
    run.until_acting(0)
    actors = [run.pid("actor-0"), run.pid("actor-1")]
    for kill in range(3):
        pid = run.kill("inference-0")
        began = time.monotonic()
        assert run.pid("inference-0", besides=pid)
        run.until_acting(0)
        run.until_acting(1)
        print(f"measured: actors act again after kill {kill} {time.monotonic() - began:.2f} s")
        run.until_learning()
    assert [run.pid("actor-0"), run.pid("actor-1")] == actors  # they waited
    summary = stop(run)
    assert summary["restarts"] == 3 and summary["dropped"] == 0


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_no_kill_tears_the_data(runs: Runs, core: str) -> None:
    """With one pass over each batch and no lag, the learner recomputes what the server said, memory included."""
    once = {"actor.trajectory": 16, "algorithm.epochs": 1, "algorithm.minibatches": 1, "optimizer.learning_rate": 0.02}
    run = runs.train("ppo", **CENTRAL, **once, **{"network.core": core, "network.core_size": 32})
    run.until_learning()
    for name in ("inference-0", "actor-1", "inference-0", "actor-0", "actor-1"):
        pid = run.kill(name)
        assert run.pid(name, besides=pid)
        run.until_learning()
    summary = stop(run)
    assert (summary["lag_max"], summary["dropped"], summary["restarts"]) == (0, 0, 5)
    divergences = [abs(row["loss"]["divergence"]) for row in run.rows() if row["loss"]]
    assert len(divergences) > 5 and max(divergences) < 1e-6


def test_stopped_actor_holds_nobody(runs: Runs) -> None:
    run = runs.train(**CENTRAL)
    run.until_acting(0)
    pid = run.kill("actor-0", signal.SIGSTOP)
    before = run.heads(2)
    for _ in range(3):
        run.until_learning()
    after = run.heads(2)
    assert after[0] <= before[0] + 1
    assert after[1] > before[1] + 1
    os.kill(pid, signal.SIGCONT)
    run.until_acting(0)
    assert run.pid("actor-0") == pid
    assert stop(run)["restarts"] == 0
