"""A cheap environment with image observations: `pictures.py:Dot`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

SIZE, LIMIT = 12, 40


class Dot(gym.Env[np.ndarray[Any, Any], np.int64]):
    """A dot on a dark image moves left or right; the closer to the middle, the higher the reward."""

    observation_space = gym.spaces.Box(0, 255, (1, SIZE, SIZE), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.column, self.t = int(self.np_random.integers(SIZE)), 0
        return self._picture(), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.column = min(max(self.column + (1 if action == 1 else -1), 0), SIZE - 1)
        self.t += 1
        return self._picture(), 1.0 - abs(self.column - SIZE / 2) / SIZE, False, self.t == LIMIT, {}

    def _picture(self) -> np.ndarray[Any, Any]:
        picture = np.zeros((1, SIZE, SIZE), np.uint8)
        picture[0, :, self.column] = 255
        return picture
