"""All roles together: the lag stays within its bound, and runs with the same seed are identical."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.envs.make import env_seeds
from echelon.runs.metrics import read_rows
from running import Runs, train_shortly


def train(folder: Path, shm_dir: Path, name: str, engine: str, **changes: Any) -> dict[str, Any]:
    """The summary of a short training."""
    return train_shortly(folder, shm_dir, name, engine, **{"stop.steps": 8_000, **changes})


def lags(run_dir: str) -> list[float]:
    return [row["lag_max"] for row in read_rows(Path(run_dir)) if row["kind"] == "train"]


@pytest.mark.parametrize("name", ["ppo", "impala"])
def test_inline_repeats_exactly(tmp_path: Path, shm_dir: Path, name: str) -> None:
    quick = {"algorithm.epochs": 2} if name == "ppo" else {}
    first, second = (train(tmp_path, shm_dir, name, "inline", **quick) for _ in range(2))
    other = train(tmp_path, shm_dir, name, "inline", seed=1, **quick)
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["weights_sha256"] != other["weights_sha256"]
    assert first["env_steps"] == second["env_steps"] >= 8_000 and first["updates"] >= 4


@pytest.mark.parametrize("num_actors", [1, 2])
def test_lock_step_gives_the_same_weights_on_every_engine(tmp_path: Path, shm_dir: Path, num_actors: int) -> None:
    quick = {"actor.num_actors": num_actors, "algorithm.epochs": 2}
    engines = ["inline", "local"] if num_actors == 1 else ["inline", "local", "local"]
    summaries = [train(tmp_path, shm_dir, "ppo", engine, **quick) for engine in engines]
    assert len({summary["weights_sha256"] for summary in summaries}) == 1
    for summary in summaries:
        assert (summary["lag_max"], summary["dropped"]) == (0, 0)
        assert set(lags(summary["run_dir"])) == {0}
    assert not list(shm_dir.iterdir())


@pytest.mark.parametrize("mode", ["local", "central"])
def test_lock_step_gives_the_same_weights_with_correlated_noise(tmp_path: Path, shm_dir: Path, mode: str) -> None:
    noisy = {"env.id": "Pendulum-v1", "algorithm.noise_correlation": 0.9, "acting.mode": mode, "acting.groups": 1}
    one = {"actor.num_actors": 1, "algorithm.epochs": 2, "stop.steps": 4_000}
    summaries = [train(tmp_path, shm_dir, "ppo", engine, **noisy, **one) for engine in ("inline", "local")]
    assert len({summary["weights_sha256"] for summary in summaries}) == 1


@pytest.mark.parametrize("max_lag", [1, 2])
def test_lag_stays_within_its_bound(tmp_path: Path, shm_dir: Path, max_lag: int) -> None:
    small = {"actor.trajectory": 16, "algorithm.epochs": 2, "learner.max_lag": max_lag}
    summary = train(tmp_path, shm_dir, "async-ppo", "local", **small)
    assert summary["lag_max"] <= max_lag
    assert max(lags(summary["run_dir"])) <= max_lag


@pytest.mark.parametrize("max_lag", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_slow_actor_is_too_late_and_everybody_else_goes_on(runs: Runs, max_lag: int) -> None:
    slow = env_seeds(0, 1, 0, 2)
    run = runs.train(
        "async-ppo",
        "unruly:SlowEnv",
        **{
            "env.kwargs": f'{{"step_s": 0.1, "seeds": {slow}}}',
            "actor.envs": 2,
            "actor.trajectory": 8,
            "learner.max_lag": max_lag,
            "learner.patience_s": 0.1,
            "learner.batch": 2,
            "algorithm.epochs": 1,
            "algorithm.minibatches": 1,
        },
    )
    run.until(lambda: any(row["dropped"] >= 2 for row in run.rows()), "late trajectories are dropped")
    run.until_learning()
    assert max(row["lag_max"] for row in run.rows()) <= max_lag
    fast, late = run.heads(2)
    assert fast > 2 * late
    assert "made no progress" not in run.text()
