"""A trained policy for programs of your own: `load` reads it from a run folder or a weights file.

It imports the network and what reads its files: no processes, sockets, environments or plots.

Shapes: K rows of a batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from echelon.algorithms.model import Model, Policy
from echelon.disk import MAX_JSON_BYTES, open_regular
from echelon.errors import ConfigError
from echelon.layers import State
from echelon.runs.checkpoint import NEWEST, STATE, UNDECODABLE, read_weights, unreadable_weights, weights_path
from echelon.runs.folder import CONFIG, RunFolder
from echelon.runs.policy_spec import KEY, PolicySpec
from echelon.schema import MASK, Spaces, Tree, flatten, space_choices, space_leaves, unflatten


def load(
    path: str | Path, checkpoint: str = NEWEST, *, trust: bool = False, device: str = "cpu", seed: int = 0
) -> TrainedPolicy:
    """Returns the policy of a run folder, of a checkpoint in it, or of a weights file.

    `checkpoint` is "newest", or the name of a checkpoint of the run. `seed` is that of sampled actions. Only with
    `trust` is a network imported that somebody else's configuration names, as by `evaluate`.
    """
    source, spec = _find(Path(path), checkpoint, trust)
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


class Rows(NamedTuple):
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
        self.choices = space_choices(self.space)
        has_mask = isinstance(self.space, gym.spaces.Dict) and MASK in self.space.spaces
        self.mask_index = [leaf.path for leaf in self.leaves].index(f"observation.{MASK}") if has_mask else None
        self.num_choices = _num_choices(spaces.action)

    def read(self, observation: Tree, mask: Any = None) -> Rows:
        if self.mask_index is not None and mask is not None and isinstance(observation, Mapping):
            observation = {**observation, MASK: mask}
        try:
            values = flatten(self.space, observation)
        except (LookupError, TypeError) as error:
            raise ConfigError(f"the observation is not of the space {self.space}: {error!r}.") from error
        named = list(zip(self.leaves, values, strict=True))
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
        rows = [
            tensor.reshape(count, *leaf.shape).to(self.device, dtype)
            for tensor, leaf, dtype in zip(tensors, self.leaves, self.dtypes, strict=True)
        ]
        self._check_choices(rows)
        return Rows(unflatten(self.space, iter(rows)), allowed, count, not lead)

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
        if self.num_choices is None:
            raise ConfigError("mask= does not apply: the policy has continuous actions. Leave it out.")
        allowed = _tensor(mask, "mask", "i")
        if tuple(allowed.shape) not in ((self.num_choices,), (count, self.num_choices)):
            raise ConfigError(
                f"mask has the shape {tuple(allowed.shape)}; expected ({self.num_choices},), one entry per choice, or "
                f"({count}, {self.num_choices}) for these {count} observations."
            )
        return (allowed != 0).expand(count, self.num_choices).to(self.device)

    def _check_choices(self, rows: list[Tensor]) -> None:
        for choices in self.choices:
            row, leaf = rows[choices.leaf], self.leaves[choices.leaf]
            low, high = (torch.as_tensor(bound, device=self.device) for bound in (choices.low, choices.high))
            if bool(((row < low) | (row > high)).any()):
                raise ConfigError(f"{leaf.path} is outside its space: its values are {choices.low} to {choices.high}.")


def _num_choices(space: gym.Space[Any]) -> int | None:
    """Returns the number of entries of a mask; None if actions are continuous."""
    match space:
        case gym.spaces.Discrete():
            return int(space.n)
        case gym.spaces.MultiDiscrete():
            return int(space.nvec.sum())
        case _:
            return None


def _tensor(value: Any, path: str, kind: str) -> Tensor:
    """Returns `value` as a tensor; refuses what loses its meaning in an array of `kind`, as floats do in integers."""
    try:
        tensor = value if isinstance(value, Tensor) else torch.tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} is {value!r:.60}, not an array of numbers: {error}.") from error
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
    if os.path.isfile(path):
        source = path.resolve()
        if (text := read_metadata(source).get(KEY)) is not None:
            return source, PolicySpec.from_metadata(text, source, trust=trust)
        run = source.parent
    elif os.path.isfile(path / STATE):
        source = path.resolve()
        run = source.parent.parent
    else:
        raise ConfigError(f"{path} is neither a run folder nor a weights file. Give one of them.")
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


def read_metadata(path: Path) -> dict[str, str]:
    """Returns the metadata of a weights file; reads nothing else of it."""
    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > MAX_JSON_BYTES:
                raise ValueError(f"its header has {size:,} bytes")
            metadata = json.loads(file.read(size)).get("__metadata__", {})
        return {str(name): str(value) for name, value in metadata.items()}
    except (OSError, RecursionError, *UNDECODABLE) as error:
        raise unreadable_weights(path, error) from error
