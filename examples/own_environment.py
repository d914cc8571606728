"""Trains on your own environment: `python examples/own_environment.py`, or from the command line
`echelon train ppo examples/own_environment.py:Corridor --until-return 0.9 --minutes 1`.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

import echelon
from echelon.config import replace
from echelon.presets import ppo


class Corridor(gym.Env[np.ndarray[Any, Any], np.int64]):
    """Walk `length` steps to the right; every step has a small cost, the end a reward of 1."""

    def __init__(self, length: int = 8) -> None:
        self.length = length
        self.observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.position, self.t = 0, 0
        return self._seen(), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.position = max(self.position + (1 if action == 1 else -1), 0)
        self.t += 1
        arrived = self.position == self.length
        return self._seen(), 1.0 if arrived else -0.01, arrived, self.t == 100, {}

    def _seen(self) -> np.ndarray[Any, Any]:
        return np.array([self.position / self.length], np.float32)


if __name__ == "__main__":  # actors import this file again to find the environment
    config = replace(ppo("corridor"), **{"env.id": Corridor, "stop.until_return": 0.9, "stop.minutes": 1.0})
    result = echelon.train(config)
    print(result.status, echelon.evaluate(result.run_dir)["return_mean"])
