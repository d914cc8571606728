"""n-step transitions from the steps of K environments.

A transition starts at a step and spans m steps of one episode: n steps, or fewer where the episode ends. Its reward is
the discounted sum over the m steps. Its discount is gamma**m, or 0 where the episode terminated; a transition of a
truncated episode keeps its discount and bootstraps from the true last observation. A step that only resets (`valid` is
0) belongs to no transition. If an environment starts again without an end of its episode, for example because it was
replaced after an error, its open transitions are dropped.

Shapes: K environments, n steps of the window, M completed transitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.replay.layout import ReplayError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Transitions:
    """Completed transitions; those of one environment are ordered from oldest to newest."""

    start: dict[str, Array]  # (M, ...) the values passed with the first step of each transition
    reward: Array  # (M,) float32; infinite where the sum of finite rewards overflows
    discount: Array  # (M,) float32
    envs: Array  # (M,) the environment of each; its last observation is row `envs` of the newest observation

    def without(self, envs: Array) -> Transitions:
        """Returns those that are not of `envs`, a mask (K,)."""
        kept = ~envs[self.envs]
        start = {name: value[kept] for name, value in self.start.items()}
        return Transitions(start, self.reward[kept], self.discount[kept], self.envs[kept])


class NStep:
    """The window of the last n steps. Call `push` once per step, for all K environments."""

    def __init__(self, num_envs: int, num_steps: int, discount: float) -> None:
        if num_steps < 1 or not 0.0 <= discount <= 1.0:
            raise ReplayError(
                f"n-step returns of {num_steps} steps with discount {discount}: use 1 or more steps, and a discount "
                "from 0 to 1."
            )
        self._n = num_steps
        self._powers = discount ** np.arange(num_steps + 1)
        self._start: dict[str, Array] = {}
        self._is_open = np.zeros((num_steps, num_envs), np.bool_)
        self._length = np.zeros((num_steps, num_envs), np.int64)
        self._reward = np.zeros((num_steps, num_envs))
        self._t = 0

    def push(self, start: Mapping[str, Array], reward: Array, ends: tuple[Array, Array], valid: Array) -> Transitions:
        """Adds one step and returns the transitions that it completes.

        `start` (K, ...) holds what a transition keeps of its first step: observation, action, values. `ends` are
        `terminated` and `truncated`. All arguments belong to the same step, as in a row of a trajectory.
        """
        terminated, truncated = ends
        is_open, length, row = self._is_open, self._length, self._t % self._n
        if not self._start:
            self._start = {name: np.empty((self._n, *value.shape), value.dtype) for name, value in start.items()}
        for name, window in self._start.items():
            window[row] = start[name]
        is_open[:, ~valid] = False
        is_open[row], length[row], self._reward[row] = valid, 0, 0.0
        self._reward += np.where(is_open, self._powers[length] * reward, 0.0)
        length += is_open
        complete = is_open & ((length == self._n) | terminated | truncated)
        is_open &= ~complete
        self._t += 1
        oldest_first = np.arange(self._t, self._t + self._n) % self._n
        places, envs = np.nonzero(complete[oldest_first])
        rows = oldest_first[places]
        goes_on = np.where(terminated[envs], 0.0, self._powers[length[rows, envs]])
        with np.errstate(over="ignore"):
            summed = self._reward[rows, envs].astype(np.float32)
        return Transitions(
            start={name: window[rows, envs] for name, window in self._start.items()},
            reward=summed,
            discount=goes_on.astype(np.float32),
            envs=envs,
        )

    def clear(self, envs: Array | slice = slice(None)) -> None:
        """Drops the open transitions of `envs`: a mask (K,), or all."""
        self._is_open[:, envs] = False
