"""An environment whose every figure is known in advance, and which fails on request."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

LENGTH = 25
STEP_S = 0.0003  # leaves the processor to whoever recovers


class Clock(gym.Env[Any, Any]):
    """Every episode has LENGTH steps with reward 1: another return or length was torn, mixed or counted twice.

    When the file `order` appears, the first process that takes it does what it says: `raise`, `hang` or `nan`.
    """

    def __init__(self, order: str = "") -> None:
        self.observation_space = gym.spaces.Box(-2.0, 2.0, (4,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.order, self.t = order, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(STEP_S)
        self.t += 1
        observation = self._observation()
        if self.order and os.path.exists(self.order) and (what := self._take_order()):
            if what == "raise":
                raise RuntimeError("the environment was told to raise")
            while what == "hang":
                time.sleep(3600.0)
            observation[:] = np.nan
        return observation, 1.0, self.t == LENGTH, False, {}

    def _observation(self) -> Any:
        angle = 2.0 * np.pi * self.t / LENGTH
        return np.array([np.sin(angle), np.cos(angle), self.t / LENGTH, 1.0], np.float32)

    def _take_order(self) -> str:
        own = f"{self.order}-{os.getpid()}-{id(self)}"
        with contextlib.suppress(FileNotFoundError):  # another process took it
            os.rename(self.order, own)
            return Path(own).read_text()
        return ""
