"""Short trainings of every algorithm and kind of network, for tests that use what was trained."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch

import echelon
from echelon.config import replace
from toy_envs import CounterEnv

TINY = {
    "engine": "inline",
    "actor.num_actors": 1,
    "actor.envs": 2,
    "actor.trajectory": 8,
    "network.hidden": (8,),
    "evaluation.episodes": 0,
    "stop.steps": 100,
}
PPO = {"algorithm.minibatches": 2, "algorithm.epochs": 1}
REPLAY = {"replay.min_size": 64, "replay.batch": 16, "replay.capacity": 1000}
NORMALIZED = {"network.normalize_observation": True}
GRU = {"network.core": "gru", "network.core_size": 8}
LSTM = {"network.core": "lstm", "network.core_size": 8}

RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "impala": ("impala", "CartPole-v1", {}),
    "ppo": ("ppo", "CartPole-v1", {**PPO, "run.keep_checkpoints": 5, "run.checkpoint_interval_s": 1e-6}),
    "ppo-continuous": ("ppo", "Pendulum-v1", {**PPO, **NORMALIZED}),
    "a3c": ("a3c", "CartPole-v1", {}),
    "dqn": ("dqn", "CartPole-v1", {**REPLAY, **NORMALIZED}),
    "qr-dqn": ("qr-dqn", "CartPole-v1", REPLAY),
    "sac-discrete": ("sac", "CartPole-v1", {**REPLAY, **NORMALIZED}),
    "sac-continuous": ("sac", "Pendulum-v1", REPLAY),
    "td3": ("td3", "Pendulum-v1", {**REPLAY, **NORMALIZED}),
    "apex-ddpg": ("apex-ddpg", "Pendulum-v1", REPLAY),  # publishes its critic
    "gru": ("ppo", "CartPole-v1", {**PPO, **GRU, **NORMALIZED}),
    "lstm": ("impala", "Pendulum-v1", LSTM),
    "tree": ("ppo", "toy_envs:TreeEnv", {**PPO, **LSTM}),  # a Dict with a Tuple; actions start at 5
    "masked": ("ppo", "toy_envs:MaskedEnv", PPO),
    "masked-dqn": ("dqn", "toy_envs:MaskedEnv", {**REPLAY, **NORMALIZED}),
    "image": ("impala", "policy_runs:PictureEnv", {}),
    "knobs": ("ppo", "policy_runs:KnobsEnv", PPO),
    "custom": ("ppo", "CartPole-v1", {**PPO, "network.name": "policy_runs:Averaging"}),
}


class PictureEnv(CounterEnv):
    """Observes an image of bytes, channels last; its actions are unbounded on one side."""

    def __init__(self) -> None:
        super().__init__(length=7)
        self.observation_space = gym.spaces.Box(0, 255, (10, 10, 3), np.uint8)
        self.action_space = gym.spaces.Box(np.array([-4.0, 0.0], np.float32), np.array([2.0, np.inf], np.float32))

    def observation(self) -> Any:
        return np.random.default_rng(self.draw + self.t).integers(0, 256, (10, 10, 3), np.uint8)


class KnobsEnv(CounterEnv):
    """Actions are choices of different numbers."""

    def __init__(self) -> None:
        super().__init__(length=7)
        self.action_space = gym.spaces.MultiDiscrete([2, 4, 3], start=[1, 0, -1])


class Averaging(torch.nn.Module):
    """A user's recurrent network: acts by the running mean of its observations."""

    state_shapes = ((4,), (1,))

    def __init__(self, spaces: Any, num_params: int) -> None:
        super().__init__()
        self.policy, self.value = torch.nn.Linear(4, num_params), torch.nn.Linear(4, 1)

    def forward(self, observation: Any, state: Any, first: Any) -> Any:
        means = []
        total, count = state
        for x, begins in zip(observation, first, strict=True):
            total = total.masked_fill(begins.unsqueeze(-1), 0.0) + x
            count = count.masked_fill(begins.unsqueeze(-1), 0.0) + 1.0
            means.append(total / count)
        mean = torch.stack(means)
        return self.policy(mean), self.value(mean).squeeze(-1), (total, count)


class PolicyRuns:
    """The runs of RUNS under one folder; each is trained when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __getitem__(self, name: str) -> Path:
        path, (preset, env, changes) = self.root / name, RUNS[name]
        if not path.exists():
            known = env if env.endswith("-v1") else "CartPole-v1"
            config = replace(echelon.preset(preset, known), **{**TINY, "env.id": env, "run.dir": str(path), **changes})
            with patch("echelon.runs.report.drawn_curve", return_value=None):  # most of the time of such a run
                echelon.train(config, output=io.StringIO())
        return path
