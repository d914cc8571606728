"""Humanoids of gymnasium (MuJoCo), EnvPool and PyBullet: unbounded observations in float64, continuous actions."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

from echelon.config import EnvConfig
from echelon.envs.make import make_group
from echelon.envs.vector import StepRows
from echelon.runs.weights import find_weights
from running import train_shortly

HUMANOIDS = [
    pytest.param("Humanoid-v5", 348, "mujoco", id="gymnasium"),
    pytest.param("envpool:Humanoid-v5", 348, "envpool", id="envpool"),
    pytest.param("pybullet_envs_gymnasium:HumanoidBulletEnv-v0", 44, "pybullet", id="pybullet"),
]
K = 2


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f'{package} is not installed: pip install "echelon[{package}]"')


@pytest.mark.parametrize(("id", "size", "package"), HUMANOIDS)
def test_a_humanoid_falls_and_its_observations_fit_into_float32(id: str, size: int, package: str) -> None:
    need(package)
    group, draw = make_group(EnvConfig(id=id), list(range(K))), np.random.default_rng(0)
    assert group.spaces.observation.shape == (size,) and group.spaces.action.shape == (17,)
    observation = [np.full((K, size), np.nan, np.float32)]
    group.reset(observation)
    falls = 0
    for _ in range(200):
        rows = StepRows(observation, np.zeros(K, np.float32), *(np.zeros(K, bool) for _ in range(3)))
        group.step(draw.uniform(-1.0, 1.0, (K, 17)).astype(np.float32), rows)
        assert np.isfinite(observation[0]).all() and np.isfinite(rows.reward).all()
        falls += int(rows.terminated.sum())
    group.close()
    assert falls > 0


@pytest.mark.parametrize(("id", "size", "package"), HUMANOIDS)
def test_ppo_trains_a_humanoid(tmp_path: Path, shm_dir: Path, id: str, size: int, package: str) -> None:
    need(package)
    fields = {"env.id": id, "actor.envs": 2, "actor.trajectory": 64, "stop.steps": 500, "algorithm.epochs": 2}
    fields |= {"network.normalize_observation": True, "algorithm.normalize_reward": True}
    summary = train_shortly(tmp_path, shm_dir, "ppo", "inline", **fields)
    assert summary["env_steps"] >= 500 and summary["episodes"] > 0 and math.isfinite(summary["return_mean"])
    weights = find_weights(summary["run_dir"])
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())
    means = [tensor for name, tensor in weights.items() if name.endswith("mean") and tensor.shape == (size,)]
    assert means and all(float(mean.abs().max()) > 0.1 for mean in means), "the normalizers have seen observations"
