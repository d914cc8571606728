"""A policy that the user brings: an object that acts, learns from batches, and shows and takes its state.

Its state crosses processes as named arrays of fixed shapes, laid end to end on the weights board and sent as they lie
there: nothing of it is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from echelon.algorithms.peers import ALONE
from echelon.errors import ConfigError
from echelon.layout import ArrayField, place, size_of, views_of
from echelon.roles.update import Acknowledge, AnyBatch, LossAccount, Tick
from echelon.schema import TransitionBatch, Tree
from echelon.transport.extensions import ARRAY_DTYPES

Array = np.ndarray[Any, Any]
WANTED = (
    "a policy of your own has act(observation, *, explore), update(batch), and state() with load_state(state), or "
    "state_dict() with load_state_dict(state) as every torch module"
)


class UserPolicy(Protocol):
    """What a policy of the user's offers; `state_dict` and `load_state_dict` will do for the last two."""

    def act(self, observation: Tree, *, explore: bool) -> Any:
        """The action, as the environment takes it, for one observation, as the environment gives it."""

    def update(self, batch: TransitionBatch) -> Mapping[str, float] | None:
        """Learns from one batch of transitions (tensors on the CPU); returns figures to show, if there are any.

        The memory of the batch is used again after the call: copy (`clone`) what is to be kept.
        """

    def state(self) -> Mapping[str, Any]:
        """All that acting needs: arrays or tensors by name, of the same names and shapes at all times."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what another's `state` returned, as numpy arrays."""


def check_policy(policy: Any, *methods: str) -> None:
    """Raises ConfigError where `policy` lacks one of `methods`, or a way to show and take its state."""
    missing = [name for name in methods if not callable(getattr(policy, name, None))]
    pairs = (("state", "load_state"), ("state_dict", "load_state_dict"))
    has_state = any(all(callable(getattr(policy, name, None)) for name in pair) for pair in pairs)
    if missing or not has_state:
        lack = ", ".join([*(f"{name}()" for name in missing), *([] if has_state else ["its state"])])
        raise ConfigError(f"{type(policy).__name__} lacks {lack}: {WANTED}.")


def state_of(policy: Any) -> dict[str, Array]:
    """The state of a policy as arrays of its own at this moment (the policy goes on changing its tensors)."""
    state = policy.state() if callable(getattr(policy, "state", None)) else policy.state_dict()
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"the state of {type(policy).__name__} is a {type(state).__name__}; it must be a dict of arrays."
        )
    return {str(name): _array(str(name), value) for name, value in state.items()}


def _array(name: str, value: Any) -> Array:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    array = np.array(value)
    if array.dtype.name not in ARRAY_DTYPES:
        raise ConfigError(
            f"{name} of a policy's state is {value!r:.80} of {array.dtype}, which does not travel. Use numbers, numpy "
            f"arrays or tensors of {', '.join(ARRAY_DTYPES)}."
        )
    return array


def load_state(policy: Any, state: Mapping[str, Array]) -> None:
    """Gives a policy its state back, in the way that it offers."""
    if callable(getattr(policy, "load_state", None)):
        policy.load_state(state)
    else:
        policy.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Where the named arrays of a policy's state lie."""

    fields: tuple[ArrayField, ...]

    @classmethod
    def of(cls, state: Mapping[str, Array]) -> StateLayout:
        if not state:
            raise ConfigError(f"the policy's state is empty, so workers could not follow it: {WANTED}.")
        return cls(place([(name, array.shape, array.dtype) for name, array in state.items()]))

    @property
    def nbytes(self) -> int:
        return size_of(self.fields)

    def pack(self, state: Mapping[str, Array]) -> Array:
        """The arrays of `state`, end to end."""
        got = {name: (array.shape, array.dtype) for name, array in state.items()}
        wanted = {f.name: (f.shape, f.dtype) for f in self.fields}
        if got != wanted:
            raise ConfigError(f"the policy's state has become {got}; it was {wanted}, and workers go by that.")
        memory = np.zeros(self.nbytes, np.uint8)
        for name, view in views_of(self.fields, memory).items():
            view[...] = state[name]
        return memory

    def unpack(self, memory: Array) -> dict[str, Array]:
        """Copies of the arrays in `memory`."""
        return {name: view.copy() for name, view in views_of(self.fields, memory).items()}

    def to_json(self) -> list[Any]:
        return [[f.name, list(f.shape), f.dtype.name] for f in self.fields]

    @classmethod
    def from_json(cls, data: list[Any]) -> StateLayout:
        return cls(place([(name, tuple(shape), ARRAY_DTYPES[dtype]) for name, shape, dtype in data]))


class UserTrainable:
    """A policy object of the user's; it learns, and holds its optimizers, by itself."""

    def __init__(self, policy: Any, layout: StateLayout) -> None:
        self.policy, self.layout = policy, layout
        self.device, self.learning_rate, self.peers = torch.device("cpu"), None, ALONE

    def schedule(self, progress: float) -> None:
        """Its own affair."""

    def learn(self, batch: AnyBatch, account: LossAccount, tick: Tick, acknowledge: Acknowledge | None) -> None:
        del acknowledge  # transitions are drawn uniformly
        figures = self.policy.update(batch) or {}
        tick()
        account.note(tuple(figures), torch.tensor([float(value) for value in figures.values()]))

    def parts(self) -> list[Array]:
        return [self.layout.pack(state_of(self.policy))]

    def is_finite(self) -> bool:
        return all(bool(np.isfinite(array).all()) for array in state_of(self.policy).values())

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array) for name, array in state_of(self.policy).items()}

    def load_weights(self, weights: dict[str, torch.Tensor], source: str) -> None:
        mine = {name: tensor.shape for name, tensor in self.weights().items()}
        theirs = {name: tensor.shape for name, tensor in weights.items()}
        if mine != theirs:
            raise ConfigError(
                f"the state in {source} has {theirs}, the policy has {mine}. Give the policy it comes from."
            )
        load_state(self.policy, {name: tensor.numpy() for name, tensor in weights.items()})

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.weights()}

    def load_state_dict(self, tree: Mapping[str, Any], source: str) -> None:
        self.load_weights(tree["model"], source)
