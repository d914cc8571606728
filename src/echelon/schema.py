"""The data that processes exchange: observation trees, trajectories, batches, and their layout in memory.

A tree has the structure of the environment's space: an array for Box and Discrete, a dict for Dict, a tuple for Tuple.
In memory a tree is a list of *leaves* in a fixed order (Dict by sorted key, Tuple by index), each a plain array.

Shapes: T steps of a trajectory, K environments of a group, B lanes of a batch (trajectories x K).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Self

import gymnasium as gym
import numpy as np

from echelon.errors import ConfigError, UnsuitableEnvError
from echelon.layout import ArrayField, Leaf, place, size_of, views_of

if TYPE_CHECKING:
    import torch

Tree = Any  # an array or tensor, or a dict / tuple of trees
MASK = "action_mask"  # the key of a Dict observation that marks the allowed actions
SUPPORTED_ACTIONS: dict[str, tuple[type[gym.Space[Any]], ...]] = {  # action spaces, by kind of distribution
    "stochastic": (gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.Box),
    "greedy": (gym.spaces.Discrete,),
    "deterministic": (gym.spaces.Box,),
    "squashed": (gym.spaces.Box, gym.spaces.Discrete),
}
IMAGE_SIDE = 8  # pixels: what is smaller is a table, except for three dimensions of bytes


def space_leaves(space: gym.Space[Any], path: str = "observation") -> list[Leaf]:
    """Returns the leaves of `space` in their fixed order; raises ConfigError for an unsupported space."""
    match space:
        case gym.spaces.Dict():
            return [leaf for key in sorted(space.spaces) for leaf in space_leaves(space[key], f"{path}.{key}")]
        case gym.spaces.Tuple():
            return [leaf for i, sub in enumerate(space.spaces) for leaf in space_leaves(sub, f"{path}.{i}")]
        case gym.spaces.Box():
            dtype = np.dtype(np.float32) if space.dtype == np.float64 else np.dtype(space.dtype)
            return [Leaf(path, tuple(space.shape), dtype)]
        case gym.spaces.Discrete():
            return [Leaf(path, (), np.dtype(np.int64))]
        case gym.spaces.MultiDiscrete() | gym.spaces.MultiBinary():
            return [Leaf(path, tuple(space.shape), np.dtype(np.int64))]
        case _:
            raise UnsuitableEnvError(
                f"{path} has the space {space}, which Echelon does not support. Use Box, Discrete, MultiDiscrete, "
                "MultiBinary, or a Dict or Tuple of them (a gymnasium wrapper can convert it)."
            )


def is_image(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Returns whether an array is an image: three dimensions of bytes or of floats, or two of bytes (greyscale)."""
    is_bytes = dtype == np.uint8
    if len(shape) == 2:
        return is_bytes and min(shape) >= IMAGE_SIDE
    return len(shape) == 3 and (is_bytes or sorted(shape)[1] >= IMAGE_SIDE)


@dataclass(frozen=True, slots=True)
class Choices:
    """The valid values of a discrete leaf: low to high, both inclusive."""

    leaf: int  # index in `space_leaves`
    low: Any
    high: Any


def space_choices(space: gym.Space[Any]) -> list[Choices]:
    """Returns the discrete leaves of `space` with their valid values."""
    found = []
    for i, sub in enumerate(flatten(space, space)):
        match sub:
            case gym.spaces.Discrete():
                found.append(Choices(i, sub.start, sub.start + sub.n - 1))
            case gym.spaces.MultiDiscrete():
                found.append(Choices(i, sub.start, sub.start + sub.nvec - 1))
            case gym.spaces.MultiBinary():
                found.append(Choices(i, 0, 1))
    return found


def same_layout(space: gym.Space[Any], other: gym.Space[Any]) -> bool:
    """Returns whether one network and one replay fit both spaces; the bounds of a Box may differ."""
    try:
        leaves, choices = (space_leaves(space), space_leaves(other)), (space_choices(space), space_choices(other))
    except ConfigError:
        return False
    return leaves[0] == leaves[1] and str(choices[0]) == str(choices[1])


def flatten(space: gym.Space[Any], tree: Tree) -> list[Any]:
    """Returns the leaves of `tree`, in the order of `space_leaves`."""
    match space:
        case gym.spaces.Dict():
            return [leaf for key in sorted(space.spaces) for leaf in flatten(space[key], tree[key])]
        case gym.spaces.Tuple():
            return [leaf for i, sub in enumerate(space.spaces) for leaf in flatten(sub, tree[i])]
        case _:
            return [tree]


def missing_part(space: gym.Space[Any], tree: Tree, path: str = "observation") -> str:
    """Returns which part of `space` is missing in `tree`, and what there is; "" if nothing is missing."""
    parts: list[tuple[Any, gym.Space[Any]]] = []
    if isinstance(space, gym.spaces.Dict):
        if not isinstance(tree, Mapping):
            return f"{path} is {_kind(tree)}, not a dict with the keys {sorted(space.spaces)}"
        if missing := sorted(set(space.spaces) - set(tree)):
            return f"{path} has the keys {sorted(map(str, tree))} and lacks {missing}"
        parts = list(space.spaces.items())
    elif isinstance(space, gym.spaces.Tuple):
        if not isinstance(tree, tuple | list) or len(tree) < len(space.spaces):
            return f"{path} is {_kind(tree)}, not a tuple of {len(space.spaces)}"
        parts = list(enumerate(space.spaces))
    found = (missing_part(part, tree[key], f"{path}.{key}") for key, part in parts)
    return next(filter(None, found), "")


def _kind(tree: Tree) -> str:
    if isinstance(tree, np.ndarray):
        return f"an array of shape {tree.shape}"
    return f"a {type(tree).__name__}" + (f" of {len(tree)}" if isinstance(tree, tuple | list) else "")


def unflatten(space: gym.Space[Any], leaves: Iterator[Any]) -> Tree:
    """Returns the tree of `space` with the given `leaves`, consumed in order."""
    match space:
        case gym.spaces.Dict():
            return {key: unflatten(space[key], leaves) for key in sorted(space.spaces)}
        case gym.spaces.Tuple():
            return tuple(unflatten(sub, leaves) for sub in space.spaces)
        case _:
            return next(leaves)


def map_tree(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Applies `function` to every leaf of `tree`."""
    if isinstance(tree, Mapping):
        return {key: map_tree(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(function, value) for value in tree)
    return function(tree)


def action_leaf(space: gym.Space[Any]) -> Leaf:
    """Returns how actions of `space` are stored; raises ConfigError for an action space that no policy supports."""
    match space:
        case gym.spaces.Discrete():
            return Leaf("action", (), np.dtype(np.int64))
        case gym.spaces.MultiDiscrete() if space.nvec.ndim == 1:
            return Leaf("action", tuple(space.shape), np.dtype(np.int64))
        case gym.spaces.Box() if np.issubdtype(space.dtype, np.floating) and len(space.shape) == 1:
            return Leaf("action", tuple(space.shape), np.dtype(np.float32))
        case _:
            raise UnsuitableEnvError(
                f"the action space {space} is not supported: Echelon supports Discrete, one-dimensional MultiDiscrete "
                "and one-dimensional floating-point Box action spaces. Wrap the environment (gymnasium.wrappers) to "
                "convert it."
            )


def space_to_json(space: gym.Space[Any]) -> dict[str, Any]:
    """Returns `space` as plain JSON values, for messages and files."""
    match space:
        case gym.spaces.Dict():
            return {"kind": "dict", "spaces": {key: space_to_json(sub) for key, sub in space.spaces.items()}}
        case gym.spaces.Tuple():
            return {"kind": "tuple", "spaces": [space_to_json(sub) for sub in space.spaces]}
        case gym.spaces.Box():
            bounds = {"low": _compact(space.low), "high": _compact(space.high)}
            return {"kind": "box", "shape": list(space.shape), "dtype": str(space.dtype), **bounds}
        case gym.spaces.Discrete():
            return {"kind": "discrete", "n": int(space.n), "start": int(space.start)}
        case gym.spaces.MultiDiscrete():
            return {"kind": "multi_discrete", "nvec": space.nvec.tolist(), "start": space.start.tolist()}
        case gym.spaces.MultiBinary():
            return {"kind": "multi_binary", "shape": list(space.shape)}
        case _:
            raise ConfigError(f"the space {space} cannot be sent between processes.")


def _compact(bound: np.ndarray[Any, Any]) -> Any:
    """Returns one number if all are equal, so that the bounds of an image are not stored per pixel."""
    same = bound.size > 0 and bool((bound == bound.flat[0]).all())
    return bound.flat[0].item() if same else bound.tolist()


def space_from_json(data: Mapping[str, Any]) -> gym.Space[Any]:
    """Returns the space that `space_to_json` wrote."""
    match data["kind"]:
        case "dict":
            return gym.spaces.Dict({key: space_from_json(sub) for key, sub in data["spaces"].items()})
        case "tuple":
            return gym.spaces.Tuple([space_from_json(sub) for sub in data["spaces"]])
        case "box":
            dtype, shape = np.dtype(data["dtype"]), tuple(data["shape"])
            low, high = (np.broadcast_to(np.asarray(data[key], dtype), shape) for key in ("low", "high"))
            return gym.spaces.Box(low, high, shape, dtype.type)
        case "discrete":
            return gym.spaces.Discrete(data["n"], start=data["start"])
        case "multi_discrete":
            return gym.spaces.MultiDiscrete(np.asarray(data["nvec"]), start=np.asarray(data["start"]))
        case _:
            return gym.spaces.MultiBinary(data["shape"])


@dataclass(frozen=True, slots=True)
class Spaces:
    """The observation and action space of a single environment (not of the vector)."""

    observation: gym.Space[Any]
    action: gym.Space[Any]

    def to_json(self) -> dict[str, Any]:
        return {"observation": space_to_json(self.observation), "action": space_to_json(self.action)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Spaces:
        return cls(space_from_json(data["observation"]), space_from_json(data["action"]))


@dataclass(frozen=True, slots=True)
class TrajectorySchema:
    """The layout of one trajectory slot, computed once from the spaces.

    `observation*` and `first` have T+1 rows (the last is the observation of the next step); everything else has T.
    `first` marks the first observation of an episode; `valid=0` marks a step that only resets (never learned from).
    `version` is the version of the weights that chose each action. `episode_return` and `episode_length` are set on the
    last step of an episode and 0 elsewhere. `state*` is the recurrent state before row 0. With `with_values`, `values`
    holds the values of the chosen and of the best action, where `valued` is set.
    """

    spaces: Spaces
    num_steps: int
    num_envs: int
    state_shapes: tuple[tuple[int, ...], ...] = ()  # per leaf of the recurrent state, without K
    with_values: bool = False  # whether trajectories carry action values, for initial priorities
    fields: tuple[ArrayField, ...] = field(init=False)
    nbytes: int = field(init=False)
    observation_names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        T, K = self.num_steps, self.num_envs
        action = action_leaf(self.spaces.action)
        plan: list[tuple[str, tuple[int, ...], Any]] = []
        plan += [(leaf.path, (T + 1, K, *leaf.shape), leaf.dtype) for leaf in space_leaves(self.spaces.observation)]
        plan += [
            ("first", (T + 1, K), np.bool_),
            ("action", (T, K, *action.shape), action.dtype),
            ("log_prob", (T, K), np.float32),
            ("reward", (T, K), np.float32),
            ("terminated", (T, K), np.bool_),
            ("truncated", (T, K), np.bool_),
            ("valid", (T, K), np.bool_),
            ("version", (T,), np.int64),
            ("episode_return", (T, K), np.float32),
            ("episode_length", (T, K), np.int32),
        ]
        plan += [(f"state.{i}", (K, *shape), np.float32) for i, shape in enumerate(self.state_shapes)]
        plan += [("values", (T, 2, K), np.float32), ("valued", (T,), np.bool_)] if self.with_values else []
        fields = place(plan)
        object.__setattr__(self, "fields", fields)
        object.__setattr__(self, "nbytes", size_of(fields))
        names = tuple(leaf.path for leaf in space_leaves(self.spaces.observation))
        object.__setattr__(self, "observation_names", names)

    def views(self, memory: memoryview | np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Returns every field as an array view of `memory` (one slot); nothing is copied."""
        return views_of(self.fields, memory)


@dataclass(slots=True)
class Sequences:
    """Base class of trajectories as tensors: lanes are on axis 1, or on axis 0 of the fields in `BY_LANE`."""

    BY_LANE: ClassVar = ("state", "lanes")

    observation: Tree
    first: torch.Tensor
    action: torch.Tensor
    log_prob: torch.Tensor

    def map(self, function: Callable[[torch.Tensor, int], torch.Tensor]) -> Self:
        """Returns a copy with the results of `function(tensor, axis)`, where `axis` is that of the lanes."""

        def mapped(name: str) -> Tree:
            axis, value = 0 if name in self.BY_LANE else 1, getattr(self, name)
            return None if value is None else map_tree(lambda x: function(x, axis), value)

        return type(self)(**{entry.name: mapped(entry.name) for entry in fields(self)})

    def select(self, lanes: torch.Tensor) -> Self:
        """Returns the columns `lanes`."""
        return self.map(lambda x, axis: x.index_select(axis, lanes.to(x.device)))

    def split(self, count: int) -> list[Self]:
        """Returns views of `count` parts of consecutive columns, whose sizes differ by at most one."""
        if count == 1:
            return [self]
        bounds = [self.first.shape[1] * i // count for i in range(count + 1)]
        return [self._columns(start, stop) for start, stop in pairwise(bounds)]

    def _columns(self, start: int, stop: int) -> Self:
        return self.map(lambda x, axis: x.narrow(axis, start, stop - start))


@dataclass(slots=True)
class Batch(Sequences):
    """A batch of trajectories, stacked along the lanes, as tensors on the learner's device.

    Shapes: observation and first (T+1, B, ...), version (T, B), state leaves (B, ...), everything else (T, B, ...).
    """

    reward: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    valid: torch.Tensor
    state: tuple[torch.Tensor, ...]
    lanes: torch.Tensor  # (B,) index of each column's environment in the whole run, for statistics that span batches


@dataclass(slots=True)
class GradientBatch:
    """A batch of gradients that actors computed: their sum, on the learner's device.

    Shapes: P parameters of the flattened model, including its padding.
    """

    gradient: torch.Tensor  # (P,)
    num_gradients: int
    values: torch.Tensor  # mean of the actors' losses and metrics
    statistics: list[torch.Tensor]  # per gradient: moments of its rollout's observations and rewards


@dataclass(slots=True)
class TransitionBatch:
    """A batch of n-step transitions from the replay, as tensors on the learner's device.

    Shapes: B transitions; observation leaves (B, ...), action (B, ...), everything else (B,).
    """

    observation: Tree
    action: torch.Tensor
    reward: torch.Tensor  # the discounted sum of the n rewards
    discount: torch.Tensor  # gamma^n, or 0 where the episode terminated
    next_observation: Tree
    weight: torch.Tensor  # importance weights; ones where sampling is uniform
    keys: Any = None  # replay items of these transitions, for updating their priorities
    others: tuple[int, int] = (0, 0)  # transitions of the same batch held by learners of lower and of higher rank
