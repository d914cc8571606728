"""Runs in which actors bring gradients, whole: exact repeats, bounds, every kind of action, and going on."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

import echelon
from echelon.errors import ConfigError, DivergedError
from echelon.runs.metrics import read_rows
from running import train_shortly

LOCK_STEP = {"learner.max_lag": 0, "learner.batch": 0}


def train(folder: Path, shm_dir: Path, engine: str, **changes: Any) -> dict[str, Any]:
    """The summary of a short training."""
    return train_shortly(folder, shm_dir, "a3c", engine, **{"stop.steps": 5_000, **changes})


def rows_of(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in read_rows(Path(summary["run_dir"])) if row["kind"] == "train"]


def test_inline_repeats_exactly(tmp_path: Path, shm_dir: Path) -> None:
    fields = {"network.normalize_observation": True, "algorithm.minibatches": 2}
    first, second, other = (train(tmp_path, shm_dir, "inline", seed=seed, **fields) for seed in (0, 0, 1))
    assert first["weights_sha256"] == second["weights_sha256"] != other["weights_sha256"]
    same = ("env_steps", "episodes", "updates", "return_mean", "lag_mean", "lag_max", "dropped")
    assert [first[key] for key in same] == [second[key] for key in same]
    assert first["dropped"] == 0 and first["lag_max"] >= 1 and first["env_steps"] >= 5_000


def test_lock_step_gives_the_same_weights_on_every_engine(tmp_path: Path, shm_dir: Path) -> None:
    fields = {**LOCK_STEP, "network.normalize_observation": True}
    summaries = [train(tmp_path, shm_dir, engine, **fields) for engine in ("inline", "local")]
    assert len({summary["weights_sha256"] for summary in summaries}) == 1
    assert {(summary["lag_max"], summary["dropped"]) for summary in summaries} == {(0, 0)}
    assert not list(shm_dir.iterdir())


def test_gradients_of_every_minibatch_count(tmp_path: Path, shm_dir: Path) -> None:
    """Nobody waits for anybody; each gradient is an update, and none is dropped."""
    fields = {"algorithm.minibatches": 4, "actor.envs": 8, "actor.trajectory": 10}
    fields["stop.steps"] = 20_000  # a second: actors publish their times four times in one
    summary = train(tmp_path, shm_dir, "local", **fields)
    steps_each = 2 * 10  # of a gradient: those of two environments, but for resets
    assert summary["env_steps"] / summary["updates"] == pytest.approx(steps_each, rel=0.1)
    assert summary["dropped"] == 0 and summary["restarts"] == 0
    rows = rows_of(summary)
    assert rows[-1]["version"] == 1 + summary["updates"]
    learned = {"loss.total", "loss.policy", "loss.value", "entropy", "explained_variance", "grad_norm"}
    assert learned <= rows[-1].keys()
    assert rows[-1]["time.actor-0.env"] > 0 and any(row.get("time.actor-0.learn", 0) > 0 for row in rows)


def test_lag_stays_within_its_bound(tmp_path: Path, shm_dir: Path) -> None:
    fields = {"learner.max_lag": 1, "learner.batch": 4, "actor.envs": 8, "actor.trajectory": 5}
    summary = train(tmp_path, shm_dir, "local", **fields)
    assert summary["lag_max"] <= 1 and summary["updates"] > 25
    assert summary["env_steps"] / summary["updates"] == pytest.approx(4 * 8 * 5, rel=0.1), "four gradients a step"


@pytest.mark.parametrize("core", ["none", "gru"])
def test_continuous_actions_normalised_all_over(tmp_path: Path, shm_dir: Path, core: str) -> None:
    fields = {"env.id": "Pendulum-v1", "network.core": core, "network.core_size": 16}
    fields |= {"network.normalize_observation": True, "algorithm.normalize_advantage": True, "actor.envs": 4}
    summary = train(tmp_path, shm_dir, "inline", **fields)
    assert summary["updates"] > 40 and summary["episodes"] >= 16 and summary["return_mean"] < -200


def test_a_run_goes_on(tmp_path: Path, shm_dir: Path) -> None:
    before = train(tmp_path, shm_dir, "inline")
    after = echelon.resume(before["run_dir"], steps=8_000, output=io.StringIO()).summary
    assert after["env_steps"] >= 8_000 and after["updates"] > before["updates"]
    assert after["episodes"] > before["episodes"] and after["dropped"] == 0
    assert echelon.evaluate(before["run_dir"], episodes=2)["return_mean"] >= 8


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_a_divergence_is_told_as_one(tmp_path: Path, shm_dir: Path, engine: str) -> None:
    fields = {"optimizer.learning_rate": 1e30, "env.id": "Pendulum-v1", "optimizer.clip_norm": 0.0}
    with pytest.raises(DivergedError, match=r"actor [01].*Lower --optimizer\.learning-rate \(now 1e\+30\)"):
        train(tmp_path, shm_dir, engine, **fields)


def test_what_cannot_be_is_refused_before_anything_is_made(tmp_path: Path, shm_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.batch=3 is not a multiple of the 2 actors"):
        train(tmp_path, shm_dir, "inline", **{"learner.batch": 3, "learner.max_lag": 1})
    with pytest.raises(ConfigError, match=r"minibatches=2 gradients per rollout are more than"):
        train(tmp_path, shm_dir, "inline", **LOCK_STEP, **{"algorithm.minibatches": 2})
    assert not list(tmp_path.glob("a3c*")) and not list(shm_dir.iterdir())
