"""The current episodes of a worker's environments, one per environment, until they are sent.

Shapes: K environments, L steps of a piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.envs.vector import StepRows
from echelon.layout import Leaf
from echelon.replay.pieces import fold, overlap

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class EpisodePart:
    """Steps of one episode that are ready to be sent; its arrays are views, valid until the environment's next step."""

    env: int
    observation: list[Array]  # leaves (L + 1, ...)
    action: Array
    reward: Array
    version: Array
    num_old: int  # steps at the start that were sent before
    terminated: bool
    truncated: bool
    episode_return: float  # up to here
    episode_length: int
    evaluates: bool
    first_version: int  # version of the weights at the start of the episode

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated

    def leaves(self, stacks: set[int]) -> list[Any]:
        """Returns the observations as they are sent: leaves in `stacks`, which are image stacks, as single frames."""
        sent: list[Any] = list(self.observation)
        for place in stacks:
            frames, numbers = fold(sent[place])
            sent[place] = {"frames": frames, "numbers": numbers}
        return sent


class OpenEpisodes:
    """Records the steps of K environments; at most `max_steps` of an episode are kept, then they must be sent."""

    def __init__(self, num_envs: int, max_steps: int, n_step: int, leaves: list[Leaf], action: Leaf) -> None:
        self.num_envs, self.max_steps, self.n_step = num_envs, max_steps, n_step
        # Memory pages that no episode reaches are never touched, so they are not allocated.
        self._observation = [np.zeros((num_envs, max_steps + 1, *leaf.shape), leaf.dtype) for leaf in leaves]
        self._action = np.zeros((num_envs, max_steps, *action.shape), action.dtype)
        self._reward = np.zeros((num_envs, max_steps), np.float32)
        self._version = np.zeros((num_envs, max_steps), np.int64)
        self._t, self._num_old = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)
        self._returns, self._lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        self._first_version = np.zeros(num_envs, np.int64)
        self.evaluates = np.zeros(num_envs, np.bool_)

    def begin(self, envs: Array, observation: list[Array]) -> None:
        """Starts episodes in `envs` with their rows of `observation` (K, ...)."""
        for kept, leaf in zip(self._observation, observation, strict=True):
            kept[envs, 0] = leaf[envs]
        self._t[envs] = self._num_old[envs] = self._lengths[envs] = 0
        self._returns[envs] = 0.0

    def step(self, action: Array, version: int, rows: StepRows) -> list[EpisodePart]:
        """Records one step of every environment; returns the steps that must be sent before the next one."""
        going = np.flatnonzero(rows.valid)
        kept = going[~self.evaluates[going]]
        t = self._t[kept]
        for memory, leaf in zip(self._observation, rows.observation, strict=True):
            memory[kept, t + 1] = leaf[kept]
        self._action[kept, t], self._reward[kept, t], self._version[kept, t] = action[kept], rows.reward[kept], version
        begins = going[self._lengths[going] == 0]
        self._first_version[begins] = version
        self._t[kept] += 1
        self._returns[going] += rows.reward[going]
        self._lengths[going] += 1
        ended = rows.terminated | rows.truncated
        due = (ended & rows.valid) | (self._t == self.max_steps)
        stretches = [self._stretch(int(env), rows) for env in np.flatnonzero(due)]
        if not rows.valid.all():
            self.begin(np.flatnonzero(~rows.valid), rows.observation)
        return stretches

    def _stretch(self, env: int, rows: StepRows) -> EpisodePart:
        length = int(self._t[env])
        return EpisodePart(
            env=env,
            observation=[memory[env, : length + 1] for memory in self._observation],
            action=self._action[env, :length],
            reward=self._reward[env, :length],
            version=self._version[env, :length],
            num_old=int(self._num_old[env]),
            terminated=bool(rows.terminated[env]),
            truncated=bool(rows.truncated[env]),
            episode_return=float(self._returns[env]),
            episode_length=int(self._lengths[env]),
            evaluates=bool(self.evaluates[env]),
            first_version=int(self._first_version[env]),
        )

    def end(self, env: int, *, evaluates: bool) -> None:
        """Ends the episode of `env` after its steps were sent; `evaluates`: whether the next one is an evaluation."""
        self._t[env], self.evaluates[env] = 0, evaluates

    def continue_episode(self, env: int) -> None:
        """Continues the episode of `env` after its steps were sent; keeps those with which the next piece starts."""
        length = int(self._t[env])
        keep = overlap(self.n_step, length)
        for memory in self._observation:
            memory[env, : keep + 1] = memory[env, length - keep : length + 1].copy()
        for memory in (self._action, self._reward, self._version):
            memory[env, :keep] = memory[env, length - keep : length].copy()
        self._t[env] = self._num_old[env] = keep
