"""A trained policy for programs of your own: `load` reads it from a run folder or a weights file.

It imports the network and what reads its files: no processes, sockets, environments or plots.

Shapes: K rows of a batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from echelon.algorithms.model import Model, Policy
from echelon.disk import MAX_JSON_BYTES, open_regular
from echelon.errors import ConfigError
from echelon.layers import State
from echelon.runs.checkpoint import NEWEST, UNDECODABLE, unreadable_weights
from echelon.runs.folder import CONFIG, RunFolder, not_a_run
from echelon.runs.policy_spec import KEY, PolicySpec
from echelon.runs.weights import read_weights, run_of, steps_of, weights_path
from echelon.schema import MASK, Spaces, Tree, flatten, space_choices, space_leaves, unflatten


def load(
    path: str | Path, checkpoint: str = NEWEST, *, trust: bool = False, device: str = "cpu", seed: int = 0
) -> TrainedPolicy:
    """Returns the policy of a run folder, of a checkpoint in it, or of a weights file.

    `checkpoint` is "newest", or the name of a checkpoint of the run. `seed` is that of sampled actions. Only with
    `trust` is a network imported that somebody else's configuration names, as by `evaluate`.
    """
    source, spec = _find(*run_of(path, checkpoint), trust)
    return TrainedPolicy(spec, read_weights(source), source, device=device, seed=seed)


class PolicyStep(NamedTuple):
    """What a policy chose."""

    action: Any  # numpy, in the units of the environment: of one observation, or (K, ...)
    state: State  # for the next step: leaves (K, ...); empty if the policy is not recurrent


class TrainedPolicy:
    """Chooses actions with trained weights. It holds a generator for sampled actions, but no state of an episode."""

    def __init__(
        self, spec: PolicySpec, weights: dict[str, Tensor], source: Path, *, device: str = "cpu", seed: int = 0
    ) -> None:
        self.spec, self.spaces, self.source = spec, spec.spaces, source
        self.model = Model(spec.network, spec.spaces, spec.algorithm, device=device)
        self.model.load_weights(weights, str(source))
        self.model.network.eval()
        self._policy = Policy(self.model)
        self._rng = torch.Generator(device).manual_seed(seed)
        self._reader = ObservationReader(spec.spaces, self.model.device)

    def __repr__(self) -> str:
        steps = _steps_of(self.source)
        shown = [
            shorten(str(space), 200, placeholder=" ...") for space in (self.spaces.observation, self.spaces.action)
        ]
        trained = "" if steps is None else f" after {steps:,} steps"
        return f"<TrainedPolicy {self.source}{trained}: observes {shown[0]}, acts in {shown[1]}>"

    @property
    def is_recurrent(self) -> bool:
        return bool(self.model.network.state_shapes)

    def act(
        self,
        observation: Tree,
        state: State | None = None,
        greedy: bool = True,
        mask: Any = None,
        *,
        first: Any = None,
    ) -> PolicyStep:
        """Returns the action for one observation, or the actions (K, ...) for a batch whose leaves are (K, ...).

        `observation` is what the environment returns: arrays or tensors, or a dict or tuple of them. `state` is that of
        the previous step; without it, an episode starts. `greedy` takes the most likely action, else it is sampled.
        `mask` has a nonzero entry for every allowed choice; it replaces the observation's "action_mask". `first` (K,)
        marks the rows of a batch that start an episode, where `state` is not used.
        """
        rows = self._reader.read(observation, mask)
        network, device = self.model.network, self.model.device
        starts = torch.full((rows.num_rows,), state is None, device=device)
        if first is not None:
            starts |= torch.as_tensor(np.asarray(first), dtype=torch.bool, device=device).reshape(-1)
        begun = (
            network.initial_state(rows.num_rows, device) if state is None else self._read_state(state, rows.num_rows)
        )
        chosen = self._policy.act(rows.observation, begun, starts, self._rng, greedy=greedy, mask=rows.mask)
        action = self.model.distribution.to_env(chosen.action.cpu().numpy())
        return PolicyStep(action[0] if rows.is_single else action, chosen.state)

    def _read_state(self, state: State, num_rows: int) -> State:
        expected = [(num_rows, *shape) for shape in self.model.network.state_shapes]
        leaves = tuple(torch.as_tensor(leaf, dtype=torch.float32, device=self.model.device) for leaf in state)
        if [tuple(leaf.shape) for leaf in leaves] != expected:
            raise ConfigError(
                f"state has the shapes {[tuple(leaf.shape) for leaf in leaves]}, expected {expected} for {num_rows} "
                "observations. Give the state that act() returned for the same rows, or None to start an episode."
            )
        return leaves


class ObservationBatch(NamedTuple):
    """An observation as a batch of tensors."""

    observation: Tree  # leaves (K, ...)
    mask: Tensor | None  # (K, choices), if the caller gave one
    num_rows: int  # K
    is_single: bool  # one observation without a leading dimension


class ObservationReader:
    """Converts observations to batches of tensors; raises ConfigError if they do not fit the space."""

    def __init__(self, spaces: Spaces, device: torch.device) -> None:
        self.space, self.device = spaces.observation, device
        self.leaves = space_leaves(self.space)
        self.dtypes = [torch.from_numpy(np.empty(0, leaf.dtype)).dtype for leaf in self.leaves]
        self.limits = _integer_limits(self.space)
        has_mask = isinstance(self.space, gym.spaces.Dict) and MASK in self.space.spaces
        self.mask_index = [leaf.path for leaf in self.leaves].index(f"observation.{MASK}") if has_mask else None
        self.parts = _num_choices(spaces.action)

    def read(self, observation: Tree, mask: Any = None) -> ObservationBatch:
        is_pair = isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict)
        if is_pair and not isinstance(self.space, gym.spaces.Tuple):
            raise ConfigError("the observation is what reset() returns, (observation, info): give its first item.")
        if self.mask_index is not None and mask is not None and isinstance(observation, Mapping):
            observation = {**observation, MASK: mask}
        _check_structure(self.space, observation)
        named = list(zip(self.leaves, flatten(self.space, observation), strict=True))
        tensors = [_tensor(value, leaf.path, leaf.dtype.kind) for leaf, value in named]
        observed = [i for i in range(len(named)) if mask is None or i != self.mask_index]
        leading = {self._leading(i, tuple(tensors[i].shape)) for i in observed}
        if len(leading) > 1:
            shapes = {self.leaves[i].path: tuple(tensors[i].shape) for i in observed}
            raise ConfigError(f"the parts of the observation differ in their number of rows: {shapes}.")
        lead = leading.pop()
        count = lead[0] if lead else 1
        allowed = None if mask is None else self._read_mask(mask, count)
        if allowed is not None and self.mask_index is not None:
            tensors[self.mask_index] = allowed
        tensors = [tensor.reshape(count, *leaf.shape) for tensor, leaf in zip(tensors, self.leaves, strict=True)]
        self._check_integers(tensors)
        rows = [tensor.to(self.device, dtype) for tensor, dtype in zip(tensors, self.dtypes, strict=True)]
        self._check_finite(rows)
        if allowed is not None:
            self._check_allowed(allowed)
        elif self.mask_index is not None:
            self._check_allowed(rows[self.mask_index] != 0)
        return ObservationBatch(unflatten(self.space, iter(rows)), allowed, count, not lead)

    def _leading(self, index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the dimensions before those of the leaf: none, or the number of rows."""
        leaf = self.leaves[index]
        num_leading = len(shape) - len(leaf.shape)
        if num_leading not in (0, 1) or shape[num_leading:] != leaf.shape:
            raise ConfigError(
                f"{leaf.path} has the shape {shape}; expected {leaf.shape} for one observation, or (K, "
                f"{', '.join(map(str, leaf.shape))}) for a batch of K."
            )
        return shape[:num_leading]

    def _read_mask(self, mask: Any, count: int) -> Tensor:
        if not self.parts:
            raise ConfigError("mask= does not apply: the policy has continuous actions. Leave it out.")
        allowed, total = _tensor(mask, "mask", "i"), sum(self.parts)
        if tuple(allowed.shape) not in ((total,), (count, total)):
            raise ConfigError(
                f"mask has the shape {tuple(allowed.shape)}; expected ({total},), one entry per choice, or "
                f"({count}, {total}) for these {count} observations."
            )
        return (allowed != 0).expand(count, total).to(self.device)

    def _check_integers(self, rows: list[Tensor]) -> None:
        """Checks values before they are converted to the type of their leaf, in which they could wrap around."""
        for i, (low, high) in self.limits.items():
            row = rows[i].to(torch.int64)
            if bool((outside := (row < low.to(row.device)) | (row > high.to(row.device))).any()):
                at = tuple(outside.nonzero()[0].tolist())
                least, most = (int(bound.expand(row.shape)[at]) for bound in (low, high))
                raise ConfigError(
                    f"{self.leaves[i].path} holds {int(row[at])} in row {at[0]} and is outside its space: the values "
                    f"there are {least} to {most}. Give the observation as the environment returns it."
                )

    def _check_finite(self, rows: list[Tensor]) -> None:
        for row, leaf in zip(rows, self.leaves, strict=True):
            if row.is_floating_point() and not bool((finite := row.isfinite()).all()):
                at = tuple((~finite).nonzero()[0].tolist())
                raise ConfigError(
                    f"{leaf.path} holds {float(row[at])} in row {at[0]}, as {row.dtype}. Observations must be finite: "
                    "check the environment, or clip what it returns."
                )

    def _check_allowed(self, mask: Tensor) -> None:
        for part in torch.split(mask, self.parts, -1) if self.parts else ():
            if not bool((some := part.any(-1)).all()):
                raise ConfigError(
                    f"the action mask allows none of {part.shape[1]} choices in row {int((~some).nonzero()[0])}. Allow "
                    "at least one; if the episode of that row has ended, leave the row out."
                )


def _integer_limits(space: gym.Space[Any]) -> dict[int, tuple[Tensor, Tensor]]:
    """Returns the lowest and the highest values of the leaves that hold integers, by index."""
    limits = {choices.leaf: (choices.low, choices.high) for choices in space_choices(space)}
    for i, leaf in enumerate(flatten(space, space)):
        if isinstance(leaf, gym.spaces.Box) and np.issubdtype(leaf.dtype, np.integer) and leaf.dtype != np.uint64:
            limits[i] = leaf.low, leaf.high
    return {i: (_bound(low), _bound(high)) for i, (low, high) in limits.items()}


def _bound(values: Any) -> Tensor:
    """Returns a bound as int64, without dimensions if it is the same everywhere."""
    bound = torch.as_tensor(np.asarray(values).astype(np.int64))
    return bound.flatten()[0] if bound.numel() and bool((bound == bound.flatten()[0]).all()) else bound


def _check_structure(space: gym.Space[Any], tree: Tree, path: str = "observation") -> None:
    """Raises ConfigError unless `tree` has the dicts and tuples of `space`."""
    match space:
        case gym.spaces.Dict():
            expected = f"expected a dict with the keys {', '.join(map(repr, space.spaces))}"
            if not isinstance(tree, Mapping):
                raise ConfigError(f"{path} is {_kind(tree)}: {expected}.")
            if missing := [key for key in space.spaces if key not in tree]:
                raise ConfigError(f"the key {missing[0]!r} of {path} is missing: {expected}.")
            if extra := [key for key in tree if key not in space.spaces]:
                raise ConfigError(f"{path} has the key {extra[0]!r}, which its space does not have: {expected}.")
            for key, sub in space.spaces.items():
                _check_structure(sub, tree[key], f"{path}.{key}")
        case gym.spaces.Tuple():
            if not isinstance(tree, tuple | list) or len(tree) != len(space.spaces):
                raise ConfigError(f"{path} is {_kind(tree)}: expected a tuple of {len(space.spaces)} parts.")
            for i, sub in enumerate(space.spaces):
                _check_structure(sub, tree[i], f"{path}.{i}")


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray | Tensor):
        return f"an array of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")


def _num_choices(space: gym.Space[Any]) -> list[int]:
    """Returns the number of choices of each part of an action, which a mask has in this order; [] if continuous."""
    match space:
        case gym.spaces.Discrete():
            return [int(space.n)]
        case gym.spaces.MultiDiscrete():
            return [int(n) for n in space.nvec]
        case _:
            return []


def _tensor(value: Any, path: str, kind: str) -> Tensor:
    """Returns `value` as a tensor; refuses what loses its meaning in an array of `kind`, as floats do in integers."""
    try:
        tensor = value if isinstance(value, Tensor) else torch.tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} is {value!r:.60}, not an array of numbers: {str(error).rstrip('.')}.") from error
    if tensor.dtype.is_floating_point and kind != "f":
        raise ConfigError(f"{path} holds {tensor.dtype}; its space holds whole numbers. Do not scale observations.")
    return tensor


def _find(path: Path, checkpoint: str, trust: bool) -> tuple[Path, PolicySpec]:
    """Returns the weights of `path` and what builds their network."""
    is_run = os.path.lexists(path / CONFIG)
    if not is_run and checkpoint != NEWEST:
        raise ConfigError(f"checkpoint={checkpoint!r} is looked for in a run folder, and {path} is none.")
    if is_run:
        folder = RunFolder.open(path)
        return weights_path(str(path), checkpoint), _spec_of_run(folder, trust)
    if not os.path.isfile(path):
        raise not_a_run(path)
    source = path.resolve()
    if (text := read_metadata(source).get(KEY)) is not None:
        return source, PolicySpec.from_metadata(text, source, trust=trust)
    run = source.parent
    if os.path.lexists(run / CONFIG):
        return source, _spec_of_run(RunFolder.open(run), trust)
    raise ConfigError(
        f"{source} holds weights, but not the spaces and the configuration of their network, and there is no {CONFIG} "
        f"in {run}. Give the run folder, or a file that `echelon export --format safetensors` wrote."
    )


def _spec_of_run(folder: RunFolder, trust: bool) -> PolicySpec:
    spaces = folder.read_spaces()
    config = folder.load_config(trust=trust, given=() if spaces is None else ("env.id", "env.wrappers"))
    if config.algorithm.is_users:
        raise ConfigError(f"{folder.path} trained a user's own policy: load it in the user's program.")
    if spaces is None:  # an older release did not record them
        from echelon.envs.make import probe_spaces

        if not config.env.id:
            raise ConfigError(f"{folder.path} records neither its spaces nor an environment. Resume it once, briefly.")
        spaces = probe_spaces(config.env)
    return PolicySpec.of(config, spaces)


def _steps_of(source: Path) -> int | None:
    """Returns the environment steps of a checkpoint or of a weights file; None if they are not known."""
    try:
        return int(read_metadata(source)["env_steps"]) if source.is_file() else steps_of(source)
    except (ConfigError, LookupError, ValueError):
        return None


def read_metadata(path: Path) -> dict[str, str]:
    """Returns the metadata of a weights file; reads nothing else of it."""
    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > MAX_JSON_BYTES:
                raise ValueError("it is not a safetensors file")
            metadata = json.loads(file.read(size)).get("__metadata__", {})
        return {str(name): str(value) for name, value in metadata.items()}
    except (OSError, RecursionError, *UNDECODABLE) as error:
        raise unreadable_weights(path, error) from error
