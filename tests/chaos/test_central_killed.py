"""Central acting under fire: servers and actors are killed and stopped, and the others go on."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from running import Running, Runs

CENTRAL = {"acting": "central"}
CASES = [("none", "shm"), ("lstm", "shm"), ("lstm", "tcp")]  # core, transport


def stop(run: Running) -> dict[str, Any]:
    """Ends a run as a user does."""
    run.process.send_signal(signal.SIGINT)
    assert run.code() == 130, run.text()
    run.assert_nothing_left()
    return run.summary()


@pytest.mark.parametrize(("core", "transport"), CASES)
def test_killed_inference_server_is_replaced_while_its_actors_wait(runs: Runs, core: str, transport: str) -> None:
    run = runs.train(**CENTRAL, **{"network.core": core, "acting.transport": transport})
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


@pytest.mark.parametrize(("core", "transport"), CASES)
def test_no_kill_tears_the_data(runs: Runs, core: str, transport: str) -> None:
    """With one pass over each batch and no lag, the learner recomputes what the server said, memory included."""
    once = {"actor.trajectory": 16, "algorithm.epochs": 1, "algorithm.minibatches": 1, "optimizer.learning_rate": 0.02}
    network = {"network.core": core, "network.core_size": 32}
    run = runs.train("ppo", **CENTRAL, **once, **network, **{"acting.transport": transport})
    run.until_learning()
    for name in ("inference-0", "actor-1", "inference-0", "actor-0", "actor-1"):
        pid = run.kill(name)
        assert run.pid(name, besides=pid)
        run.until_learning()
    summary = stop(run)
    assert (summary["lag_max"], summary["dropped"], summary["restarts"]) == (0, 0, 5)
    divergences = [abs(row["kl"]) for row in run.rows() if "kl" in row]
    assert len(divergences) > 5 and max(divergences) < 1e-6


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_stopped_inference_server_is_replaced(runs: Runs, transport: str) -> None:
    slowly = {"env": "unruly:SlowEnv", "env-kwargs": '{"step_s": 0.001}', "supervision.hang_timeout_s": 8}
    run = runs.train(**CENTRAL, **slowly, **{"acting.transport": transport})
    run.until_acting(0)
    run.until_acting(1)
    actors = [run.pid("actor-0"), run.pid("actor-1")]
    pid = run.kill("inference-0", signal.SIGSTOP)
    run.until(lambda: "inference-0 made no progress for" in run.text(), "the hang is noticed")
    assert run.pid("inference-0", besides=pid)
    assert not Path(f"/proc/{pid}").exists()
    run.until_acting(0)
    run.until_acting(1)
    run.until_learning()
    assert [run.pid("actor-0"), run.pid("actor-1")] == actors  # they waited
    summary = stop(run)
    assert summary["restarts"] == 1 and summary["dropped"] == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_stopped_actor_holds_nobody(runs: Runs, transport: str) -> None:
    run = runs.train(**CENTRAL, **{"acting.transport": transport, "supervision.hang_timeout_s": 600})
    run.until_acting(0)
    run.learns_while_stopped("actor-0")
    assert stop(run)["restarts"] == 0
