"""Resets and steps an environment with random actions, and checks everything that it returns.

The raw environment is called, not its group: a group converts and unpacks what the environment returns.

Shapes: K environments of a vector environment; a single environment has no such axis.
"""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from echelon.envs.findings import STEP_REMEDY, Findings, definition, shown, step_problem
from echelon.envs.loop import LoopGroup
from echelon.envs.vector import Array, VectorGroup, first_number
from echelon.errors import user_line
from echelon.layout import Leaf
from echelon.schema import MASK, Spaces, Tree, flatten, missing_part, space_choices, space_leaves

RECORDED = 60  # arrays of the first steps that are kept, to compare them with those of an equal environment
RESET_REMEDY = "reset must return (observation, info); info is a dict and may be empty."


class RandomActions:
    """Draws actions as a new policy would: allowed choices, uniform within finite bounds, else standard normal."""

    def __init__(self, spaces: Spaces, seed: int = 0) -> None:
        self.space, self.rng = spaces.action, np.random.default_rng(seed)
        self.num_choices = choices_of(spaces.action)

    def draw(self, mask: Array | None) -> Any:
        """Returns one action; `mask` (one entry per choice) may be None, and one that allows nothing is ignored."""
        if isinstance(self.space, gym.spaces.Box):
            largest = float(np.finfo(np.float32).max)  # some environments use it for "unbounded"
            low, high = self.space.low.astype(np.float64), self.space.high.astype(np.float64)
            is_bounded = (np.abs(low) < largest) & (np.abs(high) < largest)
            uniform = self.rng.uniform(np.where(is_bounded, low, 0.0), np.where(is_bounded, high, 1.0))
            chosen = np.where(is_bounded, uniform, self.rng.standard_normal(low.shape))
            return np.clip(chosen, low, high).astype(self.space.dtype)
        start: Any = self.space.start  # type: ignore[attr-defined]
        picks = np.array([self._pick(part) for part in parts_of(mask, self.num_choices)])
        chosen = picks + start
        return chosen[0] if isinstance(self.space, gym.spaces.Discrete) else chosen  # np.int64, as gymnasium samples

    def _pick(self, allowed: Array) -> int:
        return int(self.rng.choice(np.flatnonzero(allowed) if allowed.any() else len(allowed)))


def choices_of(space: gym.Space[Any]) -> list[int]:
    """Returns the number of choices of each component of a discrete action space; none for a Box."""
    match space:
        case gym.spaces.Discrete():
            return [int(space.n)]
        case gym.spaces.MultiDiscrete():
            return [int(n) for n in space.nvec.flat]
    return []


def parts_of(mask: Array | None, num_choices: list[int]) -> list[Array]:
    """Returns the part of `mask` for each component; without a mask of the right length, everything is allowed."""
    if mask is None or mask.shape != (sum(num_choices),):
        mask = np.ones(sum(num_choices), np.bool_)
    return np.split(mask != 0, np.cumsum(num_choices)[:-1])


class Trial:
    """One environment, or a vector environment, of a group that nobody else uses."""

    def __init__(self, group: LoopGroup | VectorGroup, findings: Findings) -> None:
        self.group, self.findings, self.spaces = group, findings, group.spaces
        self.env: Any = group.env
        self.lead = (group.num_envs,) if isinstance(group, VectorGroup) else ()
        self.leaves: list[Leaf] = space_leaves(self.spaces.observation)
        self.parts: list[gym.Space[Any]] = flatten(self.spaces.observation, self.spaces.observation)
        self.choices = {choice.leaf: choice for choice in space_choices(self.spaces.observation)}
        self.actions = RandomActions(self.spaces)
        self.num_steps, self.num_ends, self.step_s = 0, 0, 0.0
        self.rewards: list[float] = []
        self.largest: dict[str, float] = {}  # absolute value of each leaf
        self.recorded: list[Array] = []  # observations and rewards of the first steps
        self._masks: Array | None = None
        self._ended = np.zeros(self.lead, np.bool_)
        self._where = "reset"

    def run(self, max_steps: int, limit_s: float) -> bool:
        """Resets and steps until a limit is reached; returns False if the environment could not continue."""
        end_s = time.perf_counter() + limit_s
        if not self.reset(self.group.seeds):
            return False
        while self.num_steps < max_steps and time.perf_counter() < end_s:
            if not (self.step() if self.lead or not self._ended else self.reset(None)):
                return False
        return True

    def reset(self, seeds: list[int] | None) -> bool:
        """Starts an episode, the first time with `seeds`; returns False if that is impossible."""
        self._where = "the first reset" if seeds is not None else f"the reset after step {self.num_steps}"
        try:
            found = self.env.reset(seed=self.group.seed_argument(seeds) if seeds is not None else None)
        except Exception as error:
            self._raised("reset", error)
            return False
        if not isinstance(found, tuple | list) or len(found) != 2:
            self._add("error", "reset signature", f"reset returned {shown(found)}.", RESET_REMEDY)
            return False
        self._ended = np.zeros(self.lead, np.bool_)
        if not self._observe(found[0]):
            return False
        self._info("reset", found[1])
        return True

    def step(self) -> bool:
        """Takes one step; returns False if the next one is impossible."""
        self._where = f"step {self.num_steps + 1}"
        begun = time.perf_counter()
        try:
            found = self.env.step(self._action())
        except Exception as error:
            self._raised("step", error)
            return False
        self.step_s += time.perf_counter() - begun
        self.num_steps += 1
        if problem := step_problem(found):
            self._add("error", "step signature", *problem)
            return False
        observation, reward, terminated, truncated, info = found
        flags = [self._flags("terminated", terminated), self._flags("truncated", truncated)]
        has_reward = self._reward(reward)
        if flags[0] is None or flags[1] is None:
            return False
        ended = flags[0] | flags[1]
        if self.lead and (ended & self._ended).any():
            self._add(
                "error",
                "autoreset",
                f"environments {np.flatnonzero(ended & self._ended).tolist()} ended twice in a row.",
                "The vector environment declares NEXT_STEP autoreset: its step after an end must only reset.",
            )
        self._ended, self.num_ends = ended, self.num_ends + int(ended.sum())
        fits = self._observe(observation)
        self._info("step", info)
        return fits and has_reward

    def _action(self) -> Any:
        if not self.lead:
            return self.actions.draw(self._masks)
        masks = self._masks if self._masks is not None else [None] * self.lead[0]
        drawn = np.array([self.actions.draw(mask) for mask in masks])
        return drawn if drawn.dtype.kind == "f" else drawn.astype(np.int64)

    def _observe(self, tree: Tree) -> bool:
        """Checks an observation; returns False if it cannot be stored, or allows no action."""
        space = self.spaces.observation
        try:
            values = flatten(space, tree)
        except (KeyError, IndexError, TypeError) as error:
            missing = missing_part(space, tree) or f"{type(error).__name__}: {error}"
            text = f"the observation of {self._where} lacks a part of its space: {missing}."
            self._add("error", "observation", text, "Correct observation_space, or the observation.", key="tree")
            return False
        if isinstance(space, gym.spaces.Dict) and (extra := sorted(set(tree) - set(space.spaces))):
            text = f"the entries {extra} are not in the observation space and are ignored."
            self._add("warning", "observation", text, "Add them to observation_space, or remove them.")
        arrays = [self._leaf(i, value) for i, value in enumerate(values)]
        if any(array is None for array in arrays):
            return False
        self._masks = None
        paths = [leaf.path for leaf in self.leaves]
        if f"observation.{MASK}" in paths and self.actions.num_choices:
            mask = arrays[paths.index(f"observation.{MASK}")]
            if mask is not None and not self._mask(mask):
                return False
        if len(self.recorded) < RECORDED:
            self.recorded += [array.copy() for array in arrays if array is not None]
        return True

    def _leaf(self, i: int, value: Any) -> Array | None:
        """Checks one leaf of an observation; returns it as an array, or None if it cannot be stored."""
        leaf, space, shape = self.leaves[i], self.parts[i], (*self.lead, *self.leaves[i].shape)
        remedy = "Correct observation_space, or the observation."
        try:
            array = np.asarray(value)
        except ValueError as error:
            self._add(
                "error", "observation", f"{leaf.path} of {self._where} is no array: {error}.", remedy, key=leaf.path
            )
            return None
        if array.shape != shape:
            text = f"{leaf.path} of {self._where} has shape {array.shape}; its space has {shape}."
            self._add("error", "observation", text, remedy, key=f"{leaf.path} shape")
            return None
        if array.dtype.kind not in "biuf":
            text = f"{leaf.path} of {self._where} has dtype {array.dtype}: {value!r:.80}."
            self._add("error", "observation", text, "It must be an array of numbers.", key=f"{leaf.path} dtype")
            return None
        self._values(leaf, space, array)
        if i in self.choices:
            choice = self.choices[i]
            outside = (array < choice.low) | (array > choice.high)
            if outside.any():
                value = first_number(leaf.path, array, outside)
                text = f"{value} at {self._where}; its space is {choice.low} to {choice.high}."
                self._add("error", "observation", text, remedy, key=f"{leaf.path} bounds")
        if array.size:
            largest = float(np.abs(array.astype(np.float64)).max())
            self.largest[leaf.path] = max(self.largest.get(leaf.path, 0.0), largest)
        return array

    def _values(self, leaf: Leaf, space: gym.Space[Any], array: Array) -> None:
        """Checks the dtype of a leaf, and its values: finite, kept by the conversion, within their bounds."""
        is_finite = np.isfinite(array)
        if not is_finite.all():
            text = f"{first_number(leaf.path, array, ~is_finite)} at {self._where}."
            self._add("error", "observation", text, "Observations must be finite.", key=f"{leaf.path} finite")
            return
        with np.errstate(over="ignore", invalid="ignore"):
            stored = array.astype(leaf.dtype)
        if (leaf.dtype.kind in "biu" and (stored != array).any()) or not np.isfinite(stored).all():
            value = first_number(leaf.path, array, stored != array)
            text = f"{value} at {self._where}, which does not fit the {leaf.dtype} of its space."
            remedy = f"Declare dtype={array.dtype} in observation_space, or convert the observation."
            self._add("error", "observation", text, remedy, key=f"{leaf.path} dtype")
        elif isinstance(space, gym.spaces.Box) and array.dtype != space.dtype:
            text = f"{leaf.path} is {array.dtype}; its space has {space.dtype}. It is converted."
            remedy = f"Return .astype(np.{space.dtype}), or declare the other dtype."
            self._add("warning", "observation", text, remedy, key=f"{leaf.path} dtype")
        if isinstance(space, gym.spaces.Box):
            slack = 1e-6 * np.maximum(1.0, np.abs(array)) if array.dtype.kind == "f" else 0
            outside = (array < space.low - slack) | (array > space.high + slack)
            if outside.any():
                index = np.argwhere(outside)[0][len(self.lead) :]
                low, high = space.low[tuple(index)], space.high[tuple(index)]
                text = (
                    f"{first_number(leaf.path, array, outside)} at {self._where}; its bounds are {low:g} and {high:g}."
                )
                remedy = "Training does not use the bounds, but correct them."
                self._add("warning", "observation", text, remedy, key=f"{leaf.path} bounds")

    def _mask(self, mask: Array) -> bool:
        """Checks the mask of the next action; returns False if it allows none."""
        self._masks = mask
        if not np.isin(mask, (0, 1)).all():
            text = f"the mask of {self._where} is {mask.tolist()!s:.120}."
            self._add("warning", "action mask", text, "Use 1 for allowed actions and 0 for others.", key="values")
        rows = mask.reshape(-1, mask.shape[-1])
        for row, ended in zip(rows, self._ended.reshape(-1), strict=True):
            if not ended and not all(part.any() for part in parts_of(row, self.actions.num_choices)):
                text = f"the mask of {self._where} allows no action: {row.tolist()!s:.120}."
                remedy = "Allow at least one (1 = allowed), or end the episode (terminated=True)."
                self._add("error", "action mask", text, remedy, key="none")
                return False
        return True

    def _reward(self, reward: Any) -> bool:
        array = np.asarray(reward) if np.shape(reward) == self.lead else None
        if array is None or array.dtype.kind not in "biuf":
            wanted = f"{self.lead[0]} numbers" if self.lead else "one number"
            text = f"the reward of {self._where} is {shown(reward)}, not {wanted}."
            self._add("error", "reward", text, "Return a float.", key="kind")
            return False
        with np.errstate(over="ignore"):
            stored = array.astype(np.float32)
        if not np.isfinite(stored).all():
            self._add(
                "error", "reward", f"the reward of {self._where} is {array}.", "Rewards must be finite.", key="nan"
            )
        self.rewards += stored.reshape(-1).tolist()
        if len(self.recorded) < RECORDED:
            self.recorded.append(array)
        return True

    def _flags(self, name: str, value: Any) -> Array | None:
        """Checks `terminated` or `truncated`; returns it as an array of bools, or None if it is none."""
        is_flag = np.shape(value) == self.lead
        array = np.asarray(value) if is_flag else None
        if array is None or (array.dtype.kind not in "biuf" and value is not None):
            wanted = f"{self.lead[0]} bools" if self.lead else "a bool"
            text = f"{name} of {self._where} is {shown(value)}, not {wanted}."
            self._add("error", "end of episode", text, "Return True or False.", key=name)
            return None
        if array.dtype.kind != "b":
            text = f"{name} is {shown(value)}; it counts as {bool(array.astype(np.bool_).any())}."
            self._add("warning", "end of episode", text, "Return True or False.", key=name)
        return array.astype(np.bool_)

    def _info(self, name: str, info: Any) -> None:
        if not isinstance(info, Mapping):
            remedy = RESET_REMEDY if name == "reset" else STEP_REMEDY
            self._add("warning", f"{name} signature", f"the info of {name} is {shown(info)}.", remedy, key="info")

    def _raised(self, name: str, error: Exception) -> None:
        method = getattr(self.env.unwrapped, name)
        if isinstance(error, TypeError) and (problem := _wrong_parameters(name, method)):
            text = f"{problem}, at {definition(method)}."
            declared = "reset(self, *, seed=None, options=None)" if name == "reset" else "step(self, action)"
            self._add("error", f"{name} signature", text, f"Declare {declared}.")
            return
        place = user_line(error)
        text = f"{self._where} raised {type(error).__name__}: {error}{f', at {place}' if place else ''}."
        shown = "".join(traceback.format_exception(error))
        self.findings.add("error", "exception", text, "Correct the environment.", traceback=shown)

    def _add(self, *arguments: Any, key: str = "") -> None:
        self.findings.add(*arguments, key=key)


def _wrong_parameters(name: str, method: Any) -> str:
    """Returns what is wrong with the parameters of `reset` or `step`, or an empty text."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return ""
    kinds = [parameter.kind for parameter in parameters.values()]
    if name == "step":
        return "" if parameters else "step takes no action"
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return ""
    missing = [word for word in ("seed", "options") if word not in parameters]
    return f"reset does not accept {' and '.join(f'{word}=' for word in missing)}" if missing else ""
