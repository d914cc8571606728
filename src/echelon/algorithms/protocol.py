"""The interface between an algorithm and the learner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from echelon.algorithms.model import FlatModule, Model

POLICY = "policy"  # group of the model's parameters


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters with a separate optimizer."""

    module: FlatModule
    learning_rate: float
    weight_decay: float = 0.0  # L2 penalty


@dataclass(slots=True)
class Loss:
    """A scalar to minimise, and its metrics (tensors, so that computing a loss does not synchronise with a GPU)."""

    value: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    group: str = POLICY  # the group that is updated; other groups get no gradient
    gradient: torch.Tensor | None = None  # flat gradient of the group, if an actor has computed it
    count: torch.Tensor | int = 1  # number of entries that the loss averages: its weight among learners, microbatches


class Algorithm(Protocol):
    """An algorithm: computes losses from batches. It has no process, queue or clock.

    Its batches are trajectories (`schema.Batch`), transitions (`schema.TransitionBatch`) or gradients
    (`schema.GradientBatch`).
    """

    model: Model

    @property
    def groups(self) -> Mapping[str, ParameterGroup]:
        """What is trained besides the model, by name: critics, a temperature."""

    def minibatches(self, batch: Any) -> Iterable[Any]:
        """Splits `batch` into minibatches."""

    def losses(self, minibatch: Any) -> Iterable[Loss]:
        """Yields the losses of one minibatch, lazily and in order: each is applied before the next is computed."""

    def priorities(self, minibatch: Any) -> torch.Tensor | None:
        """Returns the new priorities of the transitions of the last minibatch; None if the algorithm has none."""

    def finish(self, batch: Any) -> None:
        """Merges a batch into the running statistics, after its losses, so that they do not affect these losses."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a checkpoint needs besides the model's weights."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
