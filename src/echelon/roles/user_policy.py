"""User policies: objects of the user that act, learn from batches, and export and load their state.

The state is sent between processes as named arrays of fixed shapes, which are concatenated on the weights board.
Nothing is pickled.
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
from echelon.roles.loss_account import LossAccount
from echelon.roles.update import Acknowledge, AnyBatch, Tick
from echelon.schema import TransitionBatch, Tree
from echelon.transport.extensions import ARRAY_DTYPES

Array = np.ndarray[Any, Any]
WANTED = (
    "a user policy needs act(observation, *, explore), update(batch), and either state() and load_state(state) or, as "
    "torch modules have, state_dict() and load_state_dict(state)"
)


class UserPolicy(Protocol):
    """The methods of a user policy. `state_dict` and `load_state_dict` may replace the last two."""

    def act(self, observation: Tree, *, explore: bool) -> Any:
        """Returns the action for one observation, both in the format of the environment."""

    def update(self, batch: TransitionBatch) -> Mapping[str, float] | None:
        """Learns from one batch of transitions (tensors on the CPU). Returns figures to report, or None.

        The memory of the batch is reused after the call: `clone` tensors that you keep.
        """

    def state(self) -> Mapping[str, Any]:
        """Returns everything that acting needs: arrays or tensors by name. Names and shapes must never change."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Loads the state that `state` of another instance returned, as numpy arrays."""


def check_policy(policy: Any, *methods: str) -> None:
    """Raises ConfigError if `policy` lacks one of `methods`, or the methods to export and load its state."""
    missing = [name for name in methods if not callable(getattr(policy, name, None))]
    pairs = (("state", "load_state"), ("state_dict", "load_state_dict"))
    has_state = any(all(callable(getattr(policy, name, None)) for name in pair) for pair in pairs)
    if missing or not has_state:
        lack = ", ".join([*(f"{name}()" for name in missing), *([] if has_state else ["state() and load_state()"])])
        raise ConfigError(f"{type(policy).__name__} lacks {lack}: {WANTED}.")


def state_of(policy: Any) -> dict[str, Array]:
    """Returns a copy of the current state of a policy, which may change its own tensors later."""
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
            f"{name} of a policy's state is {value!r:.80} of {array.dtype}, which cannot be sent. Use numbers, numpy "
            f"arrays or tensors of {', '.join(ARRAY_DTYPES)}."
        )
    return array


def load_state(policy: Any, state: Mapping[str, Array]) -> None:
    """Loads a state into a policy, by `load_state` if it has one, else by `load_state_dict`."""
    if callable(getattr(policy, "load_state", None)):
        policy.load_state(state)
    else:
        policy.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The memory layout of the named arrays of a policy's state."""

    fields: tuple[ArrayField, ...]

    @classmethod
    def of(cls, state: Mapping[str, Array]) -> StateLayout:
        if not state:
            raise ConfigError(f"the policy's state is empty, so workers would never receive an update: {WANTED}.")
        return cls(place([(name, array.shape, array.dtype) for name, array in state.items()]))

    @property
    def nbytes(self) -> int:
        return size_of(self.fields)

    def pack(self, state: Mapping[str, Array]) -> Array:
        """Returns the arrays of `state` in one block of memory."""
        got = {name: (array.shape, array.dtype) for name, array in state.items()}
        wanted = {f.name: (f.shape, f.dtype) for f in self.fields}
        if got != wanted:
            raise ConfigError(
                f"the policy's state is now {got}, but was {wanted} when the run started. Names, shapes and dtypes "
                "must not change."
            )
        memory = np.zeros(self.nbytes, np.uint8)
        for name, view in views_of(self.fields, memory).items():
            view[...] = state[name]
        return memory

    def unpack(self, memory: Array) -> dict[str, Array]:
        """Returns copies of the arrays in `memory`."""
        return {name: view.copy() for name, view in views_of(self.fields, memory).items()}

    def to_json(self) -> list[Any]:
        return [[f.name, list(f.shape), f.dtype.name] for f in self.fields]

    @classmethod
    def from_json(cls, data: list[Any]) -> StateLayout:
        return cls(place([(name, tuple(shape), ARRAY_DTYPES[dtype]) for name, shape, dtype in data]))


def column(name: str) -> str:
    """Returns the column, in the rows of metrics, of a figure that a user's `update` returns."""
    if name == "loss":
        return "loss.total"
    return f"loss.{name.removesuffix('_loss')}" if name.endswith("_loss") else name


class UserTrainable:
    """A user policy as a trainable. The policy has its own learning rule and optimizers."""

    def __init__(self, policy: Any, layout: StateLayout) -> None:
        self.policy, self.layout = policy, layout
        self.device, self.learning_rate, self.peers = torch.device("cpu"), None, ALONE

    def schedule(self, progress: float, learning_rate: float | None) -> None:
        """Does nothing: a user policy has its own schedules."""

    def learn(self, batch: AnyBatch, account: LossAccount, tick: Tick, acknowledge: Acknowledge | None) -> None:
        del acknowledge  # transitions are drawn uniformly
        figures = self.policy.update(batch) or {}
        tick()
        columns: dict[str, str] = {}  # and their figures
        for name in figures:
            if (other := columns.setdefault(column(name), name)) != name:
                raise ConfigError(
                    f"{type(self.policy).__name__}.update returned {other!r} and {name!r}: both are {column(name)} in "
                    "the metrics. Rename one."
                )
        account.note(tuple(columns), torch.tensor([float(value) for value in figures.values()]))

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
                f"the state in {source} has {theirs}, the policy has {mine}. Use the policy that it was saved from."
            )
        load_state(self.policy, {name: tensor.numpy() for name, tensor in weights.items()})

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.weights()}

    def load_state_dict(self, tree: Mapping[str, Any], source: str) -> None:
        self.load_weights(tree["model"], source)
