"""What every learning rule offers to the learner, and nothing more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from echelon.algorithms.model import Model
from echelon.schema import Batch


@dataclass(slots=True)
class Loss:
    """A scalar to descend, and what to show of it (tensors: reading them is left to whoever shows them)."""

    value: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    """A learning rule: it turns batches into losses and knows no process, no queue and no clock."""

    model: Model

    def minibatches(self, batch: Batch) -> Iterable[Any]:
        """Cuts `batch` into the pieces that one loss each is computed from."""

    def losses(self, minibatch: Any) -> Iterable[Loss]:
        """The losses of one minibatch, lazily and in order: each is applied before the next is computed."""

    def finish(self, batch: Batch) -> None:
        """Takes statistics of a batch that was learned from (after the losses, so that they do not see them)."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold besides the model's weights."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
