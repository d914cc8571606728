"""An environment that sleeps: a step costs time but no work, like a remote simulator or a device.

echelon train impala benchmarks/sleepy.py:Sleepy --envs-per-actor 8 --minutes 1
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np


class Sleepy(gym.Env[Any, Any]):
    """Rewards the action that equals the sign of the observation's first number; every step sleeps `sleep_s`."""

    def __init__(self, sleep_s: float = 0.005, length: int = 100, size: int = 4) -> None:
        """An episode has `length` steps, an observation `size` numbers."""
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (size,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.sleep_s, self.length, self._t = sleep_s, length, 0
        self._shown = np.zeros(size, np.float32)

    def _show(self) -> Any:
        self._shown = self.np_random.uniform(-1.0, 1.0, len(self._shown)).astype(np.float32)
        return self._shown

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self.sleep_s)
        self._t += 1
        reward = float(int(action) == int(self._shown[0] > 0.0))
        return self._show(), reward, False, self._t == self.length, {}
