"""A memory task: see a cue, wait, then act on it. A policy without memory cannot do better than chance."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Recall(gym.Env[np.ndarray[Any, Any], np.int64]):
    """One of two cues is shown at the first step; `delay` steps later the matching action earns 1, the other -1.

    Observation: (cue is 0, cue is 1, act now), each 0 or 1; all 0 in between. A random policy's mean return is 0, the
    best is 1.
    """

    def __init__(self, delay: int = 20) -> None:
        self.delay = delay
        self.observation_space = gym.spaces.Box(0.0, 1.0, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.cue = int(self.np_random.integers(2))
        self.t = 0
        return np.array([self.cue == 0, self.cue == 1, False], np.float32), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        ended = self.t == self.delay
        reward = (1.0 if action == self.cue else -1.0) if ended else 0.0
        self.t += 1
        return np.array([0, 0, self.t == self.delay], np.float32), reward, ended, False, {}
