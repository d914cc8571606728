"""Groups: K environments stepped together, writing directly into the rows of a trajectory.

Autoreset is gymnasium's NEXT_STEP everywhere. The last step of an episode writes its true final observation. The next
step ignores the action, resets that environment and writes the first observation of the new episode, with reward 0,
neither terminated nor truncated, and `valid=False`. An environment replaced after an error (`on_error="restart"`)
writes such a row, too.

Shapes: K environments of a group.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from echelon.errors import ConfigError, EchelonError, EnvError, UnsuitableEnvError
from echelon.layout import Leaf
from echelon.schema import Spaces, Tree, action_leaf, flatten, space_leaves

Array = np.ndarray[Any, Any]
OnError = Literal["stop", "restart"]

MAX_FAILURES = 3  # consecutive failures without a step in between, after which a restart is considered useless


@dataclass(slots=True)
class StepRows:
    """The arrays one step of a group writes in place (usually views into shared memory)."""

    observation: list[Array]  # leaves (K, ...), in the order of schema.space_leaves
    reward: Array  # (K,) float32
    terminated: Array  # (K,) bool
    truncated: Array  # (K,) bool
    valid: Array  # (K,) bool


@dataclass(frozen=True, slots=True)
class EnvFailure:
    """An exception of an environment as text, which can be sent between processes."""

    index: int  # in its group; -1: unknown, in a vector environment
    seed: int
    step: int  # steps of this environment before it raised
    error: str
    traceback: str
    in_step: bool = True  # whether a step raised, or else its creation or a reset

    @property
    def place(self) -> str:
        """When it raised, for a message."""
        return place_text(self.step, in_step=self.in_step)


class EnvFailed(EnvError):
    """An environment raised and is not restarted."""

    def __init__(self, failure: EnvFailure, num_envs: int, remedy: str) -> None:
        who = f"environment {failure.index}" if failure.index >= 0 else f"one of {num_envs} vectorised environments"
        super().__init__(
            f"{who} (seed {failure.seed}) raised {failure.error} {failure.place}. {remedy}\n{failure.traceback}"
        )
        self.failure = failure


class EnvGroup(Protocol):
    """K environments behind one `step`."""

    spaces: Spaces
    num_envs: int
    seeds: list[int]  # of the current environments: a restarted environment has a new seed
    failures: list[EnvFailure]  # environments restarted since the caller last cleared it
    tick: Callable[[], None] | None  # called during a long step, so that a slow group does not count as hung

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Returns gymnasium's metadata of the environments."""
        ...

    @property
    def info(self) -> Mapping[str, Any]:
        """Returns the newest info of the last environment."""
        ...

    def reset(self, observation: list[Array]) -> None:
        """Starts an episode in every environment; the first call seeds them."""
        ...

    def step(self, action: Array, rows: StepRows) -> None:
        """Steps every environment with its row of `action` (K, ...), in the environment's units."""
        ...

    def get_state(self) -> dict[str, Any] | None:
        """Returns the open episodes, for `set_state`; None if the environments lack one of these two methods."""
        ...

    def set_state(self, state: Mapping[str, Any], observation: list[Array]) -> None:
        """Continues the episodes of a state of `get_state`, in an equal group that was reset; raises if it cannot.

        If it raises, the group must be reset.
        """
        ...

    def render(self) -> Any:
        """Returns what the last environment renders; None if it does not render."""
        ...

    def close(self) -> None: ...


def reset_seed(env: VectorEnv[Any, Any, Any], seeds: list[int]) -> Any:
    """Returns the argument of `env.reset(seed=)`: one seed per environment for gymnasium's classes, else the first."""
    return list(seeds) if isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv) else seeds[0]


def has_state(env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any]) -> bool:
    """Returns whether the state of `env` can be saved.

    A wrapper hides the methods of the environment below it, because it may have a state of its own.
    """
    return all(callable(getattr(env, name, None)) for name in ("get_state", "set_state"))


def as_flags(values: Sequence[bool], num_envs: int) -> Array:
    """Returns one flag per environment; raises ValueError if there are more or fewer."""
    if len(values) != num_envs:
        raise ValueError(f"it is of {len(values)} environments instead of {num_envs}")
    return np.array([bool(value) for value in values])


class VectorGroup:
    """A gymnasium VectorEnv that autoresets in NEXT_STEP mode."""

    def __init__(
        self,
        make: Callable[[list[int]], VectorEnv[Any, Any, Any]],
        seeds: list[int],
        on_error: OnError = "stop",
        reset_seed: Callable[[VectorEnv[Any, Any, Any], list[int]], Any] = reset_seed,
    ) -> None:
        self.num_envs = len(seeds)
        self.seeds = list(seeds)
        self.failures: list[EnvFailure] = []
        self.tick: Callable[[], None] | None = None  # never called: one call steps all environments
        self._make = make
        self._on_error = on_error
        self._reset_seed = reset_seed
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._ticks = 0
        self._streak = 0
        self._seeded = False
        self._infos: dict[str, Any] = {}
        try:
            self._env = make(self.seeds)
        except EchelonError:
            raise
        except Exception as error:
            remedy = "It could not be created: check env.id and env.kwargs."
            failure = describe_failure(-1, self.seeds[0], 0, error, in_step=False)
            raise EnvFailed(failure, self.num_envs, remedy) from error
        try:
            _check_vector(self._env, self.num_envs)
            check_spaces(self._env, ("single_observation_space", "single_action_space", "action_space"))
            self.spaces = Spaces(self._env.single_observation_space, self._env.single_action_space)
            self._leaves = space_leaves(self.spaces.observation)
            self._integers = integer_dtypes(self.spaces.observation)
            action_leaf(self.spaces.action)
        except ConfigError:
            self.close()
            raise
        self._env.action_space.seed(self.seeds[0])

    def reset(self, observation: list[Array]) -> None:
        try:
            seed = None if self._seeded else self._reset_seed(self._env, self.seeds)
            tree, self._infos = self._env.reset(seed=seed)
        except Exception as error:
            tree = self._recover(error, in_step=False)
        self._seeded = True
        self._ended[:] = False
        self._write(tree, observation)

    def step(self, action: Array, rows: StepRows) -> None:
        try:
            tree, reward, terminated, truncated, self._infos = self._env.step(action)
        except Exception as error:
            self._write(self._recover(error, in_step=True), rows.observation)
            rows.reward[:] = 0.0
            for flags in (rows.terminated, rows.truncated, rows.valid, self._ended):
                flags[:] = False
            return
        self._ticks += 1
        with np.errstate(over="ignore"):  # overflow becomes infinity, which the learner reports
            self._write(tree, rows.observation)
            rows.reward[:] = reward
        rows.terminated[:] = terminated
        rows.truncated[:] = truncated
        np.logical_not(self._ended, out=rows.valid)
        ended = rows.terminated | rows.truncated
        if (ended & self._ended).any():
            raise EnvError(
                f"environments {np.flatnonzero(ended & self._ended).tolist()} of {self._env} ended twice in a row: "
                "the vector environment declares NEXT_STEP autoreset, but its reset step ends an episode. Correct it, "
                "or use a factory of single environments."
            )
        rows.reward[self._ended] = 0.0
        self._ended = ended

    @property
    def env(self) -> VectorEnv[Any, Any, Any]:
        """The vector environment."""
        return self._env

    def seed_argument(self, seeds: list[int]) -> Any:
        """Returns the argument of `env.reset(seed=)`."""
        return self._reset_seed(self._env, seeds)

    def get_state(self) -> dict[str, Any] | None:
        env: Any = self._env
        return {"envs": env.get_state(), "ended": self._ended.tolist()} if has_state(env) else None

    def set_state(self, state: Mapping[str, Any], observation: list[Array]) -> None:
        env: Any = self._env
        ended = as_flags(state["ended"], self.num_envs)
        self._write(env.set_state(state["envs"]), observation)
        self._ended = ended

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._env.metadata

    @property
    def info(self) -> Mapping[str, Any]:
        columns = {name: column for name, column in self._infos.items() if np.shape(column) == (self.num_envs,)}
        return {name: column[-1] for name, column in columns.items() if not name.startswith("_")}  # not the masks

    def render(self) -> Any:
        with contextlib.suppress(NotImplementedError):
            pictures = self._env.render()  # one per environment
            return pictures[-1] if pictures else None
        return None

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the run is over, so the error has no consequence
            self._env.close()

    def _write(self, tree: Tree, out: list[Array]) -> None:
        values = flatten(self.spaces.observation, tree)
        for i, (leaf, dtype, value) in enumerate(zip(out, self._integers, values, strict=True)):
            if np.shape(value) != leaf.shape:
                raise EnvError(
                    f"{self._env} returned an observation of shape {np.shape(value)}; its space has {leaf.shape} for "
                    f"{self.num_envs} environments. Correct its single_observation_space, or the observation."
                )
            if dtype is not None and getattr(value, "dtype", None) is not dtype:
                check_stored(f"{self._env}", self._leaves[i], value)
            leaf[:] = value

    def _recover(self, error: Exception, *, in_step: bool) -> Tree:
        """Recreates the whole vector environment; returns its first observations."""
        while True:
            failure = describe_failure(-1, self.seeds[0], self._ticks, error, in_step=in_step)
            self._streak = 0 if failure.step else self._streak + 1
            raise_unless_restartable(failure, self.num_envs, self._streak, self._on_error, error)
            self.failures.append(failure)
            self.close()
            self.seeds = [next_seed(seed) for seed in self.seeds]
            self._ticks, in_step = 0, False
            try:
                self._env = self._make(self.seeds)
                self._env.action_space.seed(self.seeds[0])
                return self._env.reset(seed=self._reset_seed(self._env, self.seeds))[0]
            except EchelonError:
                raise
            except Exception as again:
                error = again


def check_spaces(env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any], names: Sequence[str]) -> None:
    """Raises UnsuitableEnvError unless every attribute of `names` is a space."""
    for name in names:
        found = getattr(env, name, None)
        if not isinstance(found, gym.Space):
            raise UnsuitableEnvError(
                f"the environment {env} has {f'{name}={found!r:.80}' if found is not None else f'no {name}'}. Set "
                f"{' and '.join(f'self.{each}' for each in names)} in its __init__, to spaces of gymnasium.spaces."
            )


def _check_vector(env: VectorEnv[Any, Any, Any], num_envs: int) -> None:
    mode = env.metadata.get("autoreset_mode")
    if mode != AutoresetMode.NEXT_STEP:
        named = f"autoreset_mode={mode}" if mode is not None else "no autoreset_mode in its metadata"
        raise UnsuitableEnvError(
            f"the vector environment {env} has {named}; Echelon needs AutoresetMode.NEXT_STEP, which keeps the final "
            "observation in the stream. Create it with autoreset_mode=AutoresetMode.NEXT_STEP (and declare it in its "
            "metadata), or use a factory of single environments."
        )
    if env.num_envs != num_envs:
        raise UnsuitableEnvError(
            f"the vector environment {env} has {env.num_envs} environments instead of {num_envs}. Its factory must "
            "create num_envs environments; set actor.envs, not env.kwargs."
        )


def integer_dtypes(space: gym.Space[Any]) -> list[np.dtype[Any] | None]:
    """Returns for each leaf of `space` the dtype that its space has if it is stored as integers, else None."""
    pairs = zip(space_leaves(space), flatten(space, space), strict=True)
    return [part.dtype if leaf.dtype.kind in "biu" else None for leaf, part in pairs]


def lost_value(leaf: Leaf, value: Any) -> str:
    """Returns the first number of `value` that changes when it is stored as `leaf`, of an integer type; else ""."""
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or np.can_cast(array.dtype, leaf.dtype):
        return ""
    with np.errstate(over="ignore", invalid="ignore"):
        is_lost = array.astype(leaf.dtype) != array
    return first_number(leaf.path, array, is_lost) if is_lost.any() else ""


def check_stored(who: str, leaf: Leaf, value: Any) -> None:
    """Raises EnvError if a number of `value`, which `who` returned, changes when it is stored as `leaf`."""
    if lost := lost_value(leaf, value):
        raise EnvError(
            f"{who} returned an observation whose {lost}, which does not fit the {leaf.dtype} of its space. Declare "
            f"dtype={np.asarray(value).dtype} in observation_space, or convert the observation."
        )


def first_number(path: str, array: Array, where: Array) -> str:
    """Returns the first number of `array` that is selected by `where`: observation.x[2, 3] is 5."""
    index = tuple(int(i) for i in np.argwhere(where)[0])
    place = f"{path}[{', '.join(map(str, index))}]" if index else path
    return f"{place} is {array[index]}"


def place_text(num_steps: int, *, in_step: bool) -> str:
    """Returns when something happened to an environment that had made `num_steps` steps; steps count from 1."""
    if in_step:
        return f"at its step {num_steps + 1}"
    return f"in the reset after its step {num_steps}" if num_steps else "before its first step"


def describe_failure(index: int, seed: int, step: int, error: Exception, *, in_step: bool) -> EnvFailure:
    """Returns `error` as an EnvFailure."""
    text = "".join(traceback.format_exception(error))
    return EnvFailure(index, seed, step, f"{type(error).__name__}: {error}", text, in_step)


def raise_unless_restartable(
    failure: EnvFailure, num_envs: int, streak: int, on_error: OnError, error: Exception
) -> None:
    """Raises EnvFailed if the failed environment must not, or cannot, be replaced."""
    if on_error == "stop":
        remedy = 'Correct the environment, or set env.on_error="restart" to replace environments that raise.'
        raise EnvFailed(failure, num_envs, remedy) from error
    if streak >= MAX_FAILURES:
        remedy = f"It failed {streak} times in a row without a step in between, so a restart does not help."
        raise EnvFailed(failure, num_envs, remedy) from error


def next_seed(seed: int) -> int:
    """Returns the seed of the environment that replaces one with `seed`; reproducible."""
    return int(np.random.SeedSequence([seed, 1]).generate_state(1)[0]) >> 1
