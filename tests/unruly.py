"""Environments and a network that misbehave, each in one way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from toy_envs import CounterEnv, Step


def is_first(flag: str) -> bool:
    """Whether nobody asked before, in any process: the flag is a file."""
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class WitnessEnv(CounterEnv):
    """Observes who it is, when, what was done to it last, and sums over all that: a mixed row contradicts itself."""

    def __init__(self, length: int = 13) -> None:
        super().__init__(length)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (32,), np.float32)
        self.seed, self.action = 0, 0

    def observation(self) -> Any:
        return evidence(np.array([self.seed >> 16, self.seed & 0xFFFF, self.episode, self.t, self.action], np.float32))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.seed, self.action = self.seed if seed is None else seed, 0
        return super().reset(seed=seed)

    def step(self, action: Any) -> Step:
        self.action = int(action)
        observation, _, terminated, truncated, info = super().step(action)
        return observation, float(observation[-1]), terminated, truncated, info


def evidence(facts: Any) -> Any:
    """`facts` (..., 5) and 27 sums of them, each with other weights."""
    weights = np.arange(1, 28 * 5 + 1, dtype=np.float32)[: 27 * 5].reshape(27, 5) % 7
    return np.concatenate([facts, facts @ weights.T], -1).astype(np.float32)


class Unhurried(gym.Wrapper[Any, Any, Any, Any]):
    """Takes a little longer for a step, without work."""

    def step(self, action: Any) -> Any:
        time.sleep(0.0002)
        return super().step(action)


class KilledOnceEnv(CounterEnv):
    """The first process that makes it is killed, as by the kernel when memory runs out."""

    def __init__(self, flag: str) -> None:
        super().__init__(length=20)
        if is_first(flag):
            os.kill(os.getpid(), signal.SIGKILL)


class UnmakeableEnv(CounterEnv):
    """Cannot even be made."""

    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class SlowEnv(CounterEnv):
    """Takes `step_s` for a step; with `seeds`, only if it was reset with one of them."""

    def __init__(self, step_s: float, seeds: list[int] | None = None) -> None:
        super().__init__(length=20)
        self.step_s, self.seeds, self.slow = step_s, seeds, seeds is None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None and self.seeds is not None:
            self.slow = seed in self.seeds
        return super().reset(seed=seed)

    def step(self, action: Any) -> Step:
        if self.slow:
            time.sleep(self.step_s)
        return super().step(action)


class HangingEnv(CounterEnv):
    """Hangs in its 30th step, once in all processes."""

    def __init__(self, flag: str) -> None:
        super().__init__(length=50)
        self.flag = flag

    def step(self, action: Any) -> Step:
        if self.t == 29 and is_first(self.flag):
            self.stare_at_the_wall()
        time.sleep(0.001)  # the others leave the processor to whoever looks for the hang
        return super().step(action)

    def stare_at_the_wall(self) -> None:
        while True:
            time.sleep(3600.0)


class RaisingEnv(CounterEnv):
    """Raises in its 30th step, once in all processes, and writes down when; its `close` hangs then."""

    def __init__(self, flag: str, close_hangs: bool = False) -> None:
        super().__init__(length=50)
        self.flag, self.close_hangs, self.raised = flag, close_hangs, False

    def step(self, action: Any) -> Step:
        if self.t == 29 and is_first(self.flag):
            Path(self.flag).write_text(str(time.time()))
            self.raised = True
            raise RuntimeError("the simulator burnt down")
        return super().step(action)

    def close(self) -> None:
        if self.raised and self.close_hangs:
            time.sleep(3600.0)


class CrashingEnv(CounterEnv):
    """Takes its process with it: `how` is a signal number, or 0 for an exit with code 0."""

    def __init__(self, how: int) -> None:
        super().__init__(length=50)
        self.how = how

    def step(self, action: Any) -> Step:
        if self.t == 29:
            os.kill(os.getpid(), self.how) if self.how else os._exit(0)
        return super().step(action)


class ParentalEnv(CounterEnv):
    """Starts a process of its own, as simulators do, and never ends it."""

    def __init__(self) -> None:
        super().__init__(length=50)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])


class LostMatrix(nn.Module):
    """Works a few times, so it passes the check before the start and fails at work."""

    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, num_params + 1)
        self.num_calls = 0

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_calls += 1
        if self.num_calls > 8:
            raise RuntimeError("the matrix is lost")
        output = self.layer(observation)
        return output[:, :-1], output[:, -1]


def lost_matrix(spaces: Any, num_params: int) -> LostMatrix:
    return LostMatrix(num_params)
