"""The interface between an algorithm and the learner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from echelon.algorithms.model import FlatModule, Model

POLICY = "policy"  # group of the model's parameters
TOTAL = "total"


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters with a separate optimizer."""

    module: FlatModule
    learning_rate: float
    weight_decay: float = 0.0  # L2 penalty


@dataclass(slots=True)
class Loss:
    """A scalar to minimise, and its metrics by column of the rows of metrics.

    The metrics are tensors, so that computing a loss does not synchronise with a GPU, and means over `count` entries,
    so that they can be summed over microbatches and learners.
    """

    value: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    group: str = POLICY  # the group that is updated; other groups get no gradient
    gradient: torch.Tensor | None = None  # flat gradient of the group, if an actor has computed it
    count: torch.Tensor | int = 1  # number of entries that the loss averages: its weight among learners, microbatches
    name: str = ""  # in the metrics; by default that of its group, and "total" for the model's

    @property
    def column(self) -> str:
        """The name of its value in the rows of metrics."""
        return f"loss.{self.name or (TOTAL if self.group == POLICY else self.group)}"

    @property
    def norm_column(self) -> str:
        """The name of the norm of its gradient in the rows of metrics."""
        return "grad_norm" if self.group == POLICY else f"grad_norm_{self.group}"


class Algorithm(Protocol):
    """An algorithm: computes losses from batches. It has no process, queue or clock.

    Its batches are trajectories (`schema.Batch`), transitions (`schema.TransitionBatch`) or gradients
    (`schema.GradientBatch`).
    """

    model: Model
    is_static: bool  # whether it is a `StaticAlgorithm`

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


class StaticAlgorithm(Algorithm, Protocol):
    """An algorithm that runs the same operations for all batches of one variant, so that a CUDA graph can hold them."""

    generator: torch.Generator

    @property
    def variant(self) -> bool:
        """Which operations the next batch runs."""

    def count_batch(self) -> None:
        """Counts a batch whose operations came from a graph; `finish` counts the others."""
