"""Whole runs with replay: exact repetition, the sampling ratio, and resuming from a snapshot."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import echelon
from echelon.config import TrainConfig, replace
from echelon.errors import ConfigError, DivergedError
from echelon.presets import REPLAY_PRESETS, preset
from echelon.roles.plan.replay import limiter_rule
from echelon.runs.metrics import read_rows

SMALL = {"network.hidden": (16,), "replay.min_size": 100, "replay.batch": 32, "replay.capacity": 2_000}
SMALL |= {"evaluation.episodes": 0, "stop.steps": 600, "replay.samples_per_insert": 8.0}


def full(*values: Any) -> Any:
    """A case of `make test-full`."""
    return pytest.param(*values, marks=pytest.mark.full)


def config_of(name: str, folder: Path, shm_dir: Path, engine: str, **changes: Any) -> TrainConfig:
    env = "CartPole-v1" if name == "mario" or "dqn" in name else "Pendulum-v1"
    places = {"run.dir": str(folder / f"{name}-{len(list(folder.iterdir()))}"), "shm_dir": str(shm_dir)}
    return replace(preset(name, env), **{"engine": engine, **SMALL, **places, **changes})


def train(name: str, folder: Path, shm_dir: Path, engine: str, **changes: Any) -> dict[str, Any]:
    """Returns the summary of a short training run."""
    return echelon.train(config_of(name, folder, shm_dir, engine, **changes), output=io.StringIO()).summary


@pytest.mark.parametrize("name", [full(name) if name == "mario" else name for name in REPLAY_PRESETS])
def test_inline_repeats_exactly(tmp_path: Path, shm_dir: Path, name: str) -> None:
    steps = {"stop.steps": 300}
    first, second, other = (train(name, tmp_path, shm_dir, "inline", seed=seed, **steps) for seed in (0, 0, 1))
    assert first["weights_sha256"] == second["weights_sha256"] != other["weights_sha256"]
    same = ("env_steps", "episodes", "updates", "return_mean", "lag_mean", "lag_max", "replay")
    assert [first[key] for key in same] == [second[key] for key in same]
    assert first["updates"] > 30 and first["env_steps"] >= 300 and not list(shm_dir.iterdir())


@pytest.mark.parametrize(
    ("name", "ratio"), [("dqn", 0.5), full("dqn", 8.0), ("apex-dqn", 8.0), full("sac", 0.5), ("sac", 8.0)]
)
def test_samples_per_insert_is_kept_within_a_hundredth(tmp_path: Path, shm_dir: Path, name: str, ratio: float) -> None:
    changes = {"replay.samples_per_insert": ratio, "actor.num_actors": 2, "acting.mode": "local"}
    changes |= {"replay.capacity": 1_000}  # a fifth of the steps fills an actor's shard, however slow that actor is
    rule = limiter_rule(config_of(name, tmp_path, shm_dir, "local", **changes))
    changes |= {"stop.steps": max(2_500, int(180 * rule.room / ratio))}  # the band is less than 1 % of that
    config = config_of(name, tmp_path, shm_dir, "local", **changes)
    replay = echelon.train(config, output=io.StringIO()).summary["replay"]
    assert replay["samples_per_insert"] == pytest.approx(ratio, rel=0.01)
    assert replay["inserted"] > 2_000 and replay["sampled"] % 32 == 0
    assert 0 <= 1_000 - replay["size"] <= 2 * rule.chunk, "but for what is being overwritten"


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_a_divergence_is_told_as_one(tmp_path: Path, shm_dir: Path, engine: str) -> None:
    changes = {"optimizer.learning_rate": 1e30, "replay.publish_every": 1}
    with pytest.raises(DivergedError, match=r"Lower --optimizer\.learning-rate \(now 1e\+30\)"):
        train("apex-dqn", tmp_path, shm_dir, engine, **changes)


class Noise(gym.Env[Any, Any]):
    """Observes four images that are new at every step: they have the shape of a stack, but are not one."""

    observation_space = gym.spaces.Box(0, 255, (4, 8, 8), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.np_random.integers(0, 256, (4, 8, 8), np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.reset()[0], 1.0, False, False, {}


def test_shards_that_cannot_fill_a_batch_are_told_and_nothing_counts_as_drawn(tmp_path: Path, shm_dir: Path) -> None:
    changes = {"env.id": Noise, "replay.frames": "stacked", "replay.capacity": 300, "actor.num_actors": 1}
    changes |= {"replay.batch": 100, "network.hidden": ()}
    output = io.StringIO()
    config = config_of("dqn", tmp_path, shm_dir, "inline", **changes)
    summary = echelon.train(config, output=output).summary
    assert summary["updates"] == summary["replay"]["sampled"] == summary["replay"]["samples_per_insert"] == 0
    assert summary["replay"]["written_off"] > 1_000
    assert output.getvalue().count("too few for a batch of 100") == 1, output.getvalue()


def test_the_record_tells_of_the_replay(tmp_path: Path, shm_dir: Path) -> None:
    changes = {"replay.publish_every": 4, "replay.beta_end": 1.0}
    summary = train("apex-dqn", tmp_path, shm_dir, "local", **changes, **{"stop.steps": 4_000})
    rows = [row for row in read_rows(Path(summary["run_dir"])) if row["kind"] == "train"]
    last = rows[-1]
    for row, later in zip(rows, rows[2:], strict=False):  # between two rows before the last one steps are counted anew
        assert row["replay.inserted"] <= later["env_steps"]
    assert last["td_error"] >= 0
    assert last["version"] == 1 + summary["updates"] // 4, "weights are published with every fourth update"
    betas = [row["replay.beta"] for row in rows]
    assert betas == sorted(betas) and betas[0] < 0.6 and betas[-1] > 0.98, "it reaches its end with the run"
    assert summary["lag_max"] <= last["version"] and summary["dropped"] == 0 and summary["restarts"] == 0


def test_a_run_goes_on_with_its_replay(tmp_path: Path, shm_dir: Path) -> None:
    before = train("apex-dqn", tmp_path, shm_dir, "inline", **{"replay.checkpoint": True})
    run = Path(before["run_dir"])
    assert [path.name for path in (run / "replay").iterdir()] == [Path(before["checkpoint"]).name]
    after = echelon.resume(run, steps=before["env_steps"] + 200, output=io.StringIO()).summary
    gained = after["replay"]["inserted"] - before["replay"]["inserted"]
    assert 150 <= gained <= 250, "what was there counts on, and nothing waits for min_size again"
    assert after["replay"]["size"] == before["replay"]["size"] + gained
    assert after["env_steps"] - before["env_steps"] <= 250 and after["episodes"] >= before["episodes"]
    assert after["replay"]["samples_per_insert"] == pytest.approx(8.0, rel=0.1)


def test_a_run_goes_on_without_its_replay(tmp_path: Path, shm_dir: Path) -> None:
    before = train("dqn", tmp_path, shm_dir, "inline")
    run = Path(before["run_dir"])
    assert not (run / "replay").exists()
    after = echelon.resume(run, steps=before["env_steps"] + 300, output=io.StringIO()).summary
    assert after["replay"]["inserted"] <= 400 and after["updates"] > before["updates"]
    assert after["env_steps"] >= before["env_steps"] + 300


def test_what_cannot_be_is_refused_before_anything_is_made(tmp_path: Path, shm_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"replay\.capacity=1000000000000 needs .* GB .*Lower replay\.capacity"):
        train("dqn", tmp_path, shm_dir, "inline", **{"replay.capacity": 10**12})
    with pytest.raises(ConfigError, match=r"learner\.max_lag=1 applies to trajectories, but dqn"):
        train("dqn", tmp_path, shm_dir, "inline", **{"learner.max_lag": 1})
    assert not list(tmp_path.glob("dqn*")) and not list(shm_dir.iterdir())
