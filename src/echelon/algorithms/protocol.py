"""What every learning rule offers to the learner, and nothing more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from echelon.algorithms.model import FlatModule, Model

POLICY = "policy"  # the group of the model's own parameters


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that have an optimizer to themselves."""

    module: FlatModule
    learning_rate: float


@dataclass(slots=True)
class Loss:
    """A scalar to descend, and what to show of it (tensors: reading them is left to whoever shows them)."""

    value: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    group: str = POLICY  # whose parameters it changes; those of others get no gradient
    gradient: torch.Tensor | None = None  # of those parameters, flat, where somebody else has found it already
    count: torch.Tensor | int = 1  # what it is the mean of, where several learners weigh theirs


class Algorithm(Protocol):
    """A learning rule: it turns batches into losses and knows no process, no queue and no clock.

    Its batches are trajectories (`schema.Batch`), transitions (`schema.TransitionBatch`) or gradients
    (`schema.GradientBatch`).
    """

    model: Model

    @property
    def groups(self) -> Mapping[str, ParameterGroup]:
        """What it learns beside the model, by name: critics, a temperature."""

    def minibatches(self, batch: Any) -> Iterable[Any]:
        """Cuts `batch` into the pieces that one loss each is computed from."""

    def losses(self, minibatch: Any) -> Iterable[Loss]:
        """The losses of one minibatch, lazily and in order: each is applied before the next is computed."""

    def priorities(self, minibatch: Any) -> torch.Tensor | None:
        """How much there was to learn from each transition of the minibatch last learned from; None: not known."""

    def finish(self, batch: Any) -> None:
        """Takes statistics of a batch that was learned from (after the losses, so that they do not see them)."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold besides the model's weights."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
