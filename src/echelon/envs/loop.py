"""K single environments stepped in a loop: the usual group of an actor, which has one core."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from echelon.envs.findings import step_problem
from echelon.envs.vector import (
    Array,
    EnvFailed,
    EnvFailure,
    OnError,
    StepRows,
    as_flags,
    check_spaces,
    check_stored,
    describe_failure,
    has_state,
    integer_dtypes,
    lost_value,
    next_seed,
    place_text,
    raise_unless_restartable,
)
from echelon.errors import EchelonError, EnvError, UnsuitableEnvError
from echelon.schema import Spaces, Tree, action_leaf, flatten, missing_part, space_leaves

SLOW_S = 1.0  # if a step of all environments takes longer, `tick` is called after each environment


class LoopGroup:
    """K single environments, stepped one after the other in this process."""

    def __init__(self, make: Callable[[], gym.Env[Any, Any]], seeds: list[int], on_error: OnError = "stop") -> None:
        self.num_envs = len(seeds)
        self.seeds = list(seeds)
        self.failures: list[EnvFailure] = []
        self.tick: Callable[[], None] | None = None
        self._slow = False  # whether the last step took longer than SLOW_S
        self._make = make
        self._on_error = on_error
        self._envs: list[gym.Env[Any, Any]] = []
        self._steps: list[Any] = []  # bound `step` methods, to save the attribute lookup
        self._ended = [False] * self.num_envs
        self._ticks = 0
        self._idle = [0] * self.num_envs  # steps of the group in which this environment made none
        self._streak = [0] * self.num_envs  # failures without a step in between
        self._seeded = False
        self.info: dict[str, Any] = {}
        try:
            for i in range(self.num_envs):
                self._add(i)
        except Exception as error:
            self.close()
            if isinstance(error, EchelonError):
                raise
            remedy = f"It could not be created: check env.id and env.kwargs (environment {i} of {self.num_envs})."
            failure = describe_failure(i, self.seeds[i], 0, error, in_step=False)
            raise EnvFailed(failure, self.num_envs, remedy) from error

    def _add(self, i: int) -> None:
        env = self._make()
        self._envs.append(env)
        self._steps.append(env.step)
        if i == 0:
            check_spaces(env, ("observation_space", "action_space"))
        env.action_space.seed(self.seeds[i])
        if i == 0:
            self.spaces = Spaces(env.observation_space, env.action_space)
            self._leaves, self._integers = space_leaves(env.observation_space), integer_dtypes(env.observation_space)
            self._one_leaf = not isinstance(env.observation_space, gym.spaces.Dict | gym.spaces.Tuple)
            action_leaf(env.action_space)
        elif env.observation_space != self.spaces.observation or env.action_space != self.spaces.action:
            raise UnsuitableEnvError(
                f"environment {i} has the spaces {env.observation_space} and {env.action_space}, environment 0 has "
                f"{self.spaces.observation} and {self.spaces.action}: all environments of a group must have equal "
                "spaces. Make them equal with a wrapper (pad observations, mask actions)."
            )

    def reset(self, observation: list[Array]) -> None:
        observations = []
        self._ended = [True] * self.num_envs
        for i, env in enumerate(self._envs):
            try:
                first, self.info = env.reset(seed=None if self._seeded else self.seeds[i])
            except Exception as error:
                first = self._recover(i, error, in_step=False)
            self._check(i, first)
            observations.append(first)
        self._seeded = True
        self._ended = [False] * self.num_envs
        self._write(observations, observation)

    def step(self, action: Array, rows: StepRows) -> None:
        self._ticks += 1
        started, tick = time.perf_counter(), self.tick if self._slow else None
        ended = self._ended
        observations: list[Tree] = []
        rewards: list[Any] = []
        terminated: list[Any] = []
        truncated: list[Any] = []
        info = self.info
        found: Any = (None,) * 5  # what a step has returned
        actions = self._actions(action)
        for i, step in enumerate(self._steps):
            act = actions[i]
            try:
                if ended[i]:
                    self._idle[i] += 1
                    observation, info = self._envs[i].reset()
                    reward, terminal, cut = 0.0, False, False
                else:
                    found = step(act)
                    observation, reward, terminal, cut, info = found
            except Exception as error:
                if problem := step_problem(found):
                    raise EnvError(f"{self._place(i)}: {' '.join(problem)}") from error
                if in_step := not ended[i]:
                    ended[i] = True
                    self._idle[i] += 1
                observation = self._recover(i, error, in_step=in_step)
                reward, terminal, cut = 0.0, False, False
            observations.append(observation)
            rewards.append(reward)
            terminated.append(terminal)
            truncated.append(cut)
            if tick is not None:
                tick()
        self.info = info
        self._slow = time.perf_counter() - started > SLOW_S
        with np.errstate(over="ignore"):  # overflow becomes infinity, which the learner reports
            self._write(observations, rows.observation)
            try:
                rows.reward[:] = rewards
            except (TypeError, ValueError):
                self._check_rewards(rewards)
                raise
        rows.terminated[:] = terminated
        rows.truncated[:] = truncated
        np.logical_not(ended, out=rows.valid)
        self._ended = np.logical_or(rows.terminated, rows.truncated).tolist()

    @property
    def env(self) -> gym.Env[Any, Any]:
        """The first environment."""
        return self._envs[0]

    def seed_argument(self, seeds: list[int]) -> int:
        """Returns the argument of `env.reset(seed=)`."""
        return seeds[0]

    def get_state(self) -> dict[str, Any] | None:
        if not all(has_state(env) for env in self._envs):
            return None
        envs: list[Any] = self._envs
        return {"envs": [env.get_state() for env in envs], "ended": list(self._ended)}

    def set_state(self, state: Mapping[str, Any], observation: list[Array]) -> None:
        ended, envs = as_flags(state["ended"], self.num_envs), list[Any](self._envs)
        observations = [env.set_state(one) for env, one in zip(envs, state["envs"], strict=True)]
        self._write(observations, observation)
        self._ended = ended.tolist()

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._envs[-1].metadata

    def render(self) -> Any:
        with contextlib.suppress(NotImplementedError):
            return self._envs[-1].render()
        return None

    def close(self) -> None:
        for env in self._envs:
            with contextlib.suppress(Exception):  # the run is over, so the error has no consequence
                env.close()

    def _actions(self, action: Array) -> Array:
        """Returns an array whose entry i, the action of environment i, that environment can keep or change."""
        if isinstance(self.spaces.action, gym.spaces.Discrete):
            return action  # its entries are np.int64, as gymnasium samples them
        return action.astype(self.spaces.action.dtype, copy=True)

    def _write(self, observations: list[Tree], out: list[Array]) -> None:
        try:
            if self._one_leaf:
                stacked = np.asarray(observations)  # one call for K rows takes half the time of K calls
                if stacked.shape != out[0].shape:  # assignment would broadcast (1,) to (4,)
                    raise ValueError(stacked.shape)
                dtype = self._integers[0]
                if dtype is not None and stacked.dtype is not dtype and lost_value(self._leaves[0], stacked):
                    raise ValueError(stacked.dtype)
                out[0][...] = stacked
                return
            columns = zip(*(flatten(self.spaces.observation, tree) for tree in observations), strict=True)
            for i, (leaf, dtype, column) in enumerate(zip(out, self._integers, columns, strict=True)):
                if dtype is not None:
                    for value in column:
                        if getattr(value, "dtype", None) is not dtype and lost_value(self._leaves[i], value):
                            raise ValueError(dtype)
                leaf[:] = column
        except (ValueError, TypeError, KeyError, IndexError):
            for i, tree in enumerate(observations):
                self._check(i, tree)
            raise

    def _check(self, i: int, tree: Tree) -> None:
        """Raises EnvError, naming environment `i`, if its observation does not fit its space."""
        try:
            leaves = flatten(self.spaces.observation, tree)
        except (KeyError, IndexError, TypeError) as error:
            found = missing_part(self.spaces.observation, tree) or f"{type(error).__name__}: {error}"
            raise EnvError(
                f"{self._place(i)} returned an observation that lacks a part of its space: {found}. Correct its "
                "observation_space, or the observation."
            ) from error
        for leaf, dtype, value in zip(self._leaves, self._integers, leaves, strict=True):
            if np.shape(value) != leaf.shape:
                raise EnvError(
                    f"{self._place(i)} returned {leaf.path} of shape {np.shape(value)}; its "
                    f"space has {leaf.shape}. Correct its observation_space, or the observation."
                )
            if dtype is not None:
                check_stored(self._place(i), leaf, value)

    def _check_rewards(self, rewards: list[Any]) -> None:
        for i, reward in enumerate(rewards):
            if np.shape(reward) != () or not isinstance(reward, int | float | np.number | np.ndarray):
                raise EnvError(f"{self._place(i)} returned the reward {reward!r}, not a number.")

    def _place(self, i: int) -> str:
        """Returns environment `i`, its seed and its step, for an error about what it has just returned."""
        in_step = not self._ended[i]
        when = place_text(self._ticks - self._idle[i] - in_step, in_step=in_step)
        return f"environment {i} (seed {self.seeds[i]}) {when}"

    def _recover(self, i: int, error: Exception, *, in_step: bool) -> Tree:
        """Replaces environment `i`, which raised `error`, by a new one; returns its first observation."""
        while True:
            failure = describe_failure(i, self.seeds[i], self._ticks - self._idle[i], error, in_step=in_step)
            self._streak[i] = 0 if failure.step else self._streak[i] + 1
            raise_unless_restartable(failure, self.num_envs, self._streak[i], self._on_error, error)
            self.failures.append(failure)
            with contextlib.suppress(Exception):  # it has failed and is being replaced
                self._envs[i].close()
            self.seeds[i] = next_seed(self.seeds[i])
            self._idle[i], in_step = self._ticks, False
            try:
                env = self._make()
                self._envs[i], self._steps[i] = env, env.step
                env.action_space.seed(self.seeds[i])
                return env.reset(seed=self.seeds[i])[0]
            except EchelonError:
                raise
            except Exception as again:
                error = again
