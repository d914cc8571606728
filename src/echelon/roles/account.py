"""What the losses of a run say: looked at, and averaged, without waiting for a GPU."""

from __future__ import annotations

import collections
import math
from typing import NamedTuple

import torch

from echelon.errors import DivergedError
from echelon.roles.staging import Reading


def diverged(what: str, learning_rate: float | None) -> DivergedError:
    """The error of a training in which `what` happened: no environment is to blame for it."""
    lower = "the learning rate"
    if learning_rate is not None:
        lower = f"--optimizer.learning-rate (now {learning_rate:g}) or --optimizer.clip-norm"
    return DivergedError(f"{what}. Lower {lower}, or scale the rewards.")


class Unchecked(NamedTuple):
    """The newest losses of a batch on their way to somebody who looks at them."""

    number: int  # of the batch
    names: tuple[str, ...]
    values: Reading


class LossAccount:
    """Means of what the losses of many minibatches say, computed where the losses are."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()  # of the newest minibatch
        self.newest = torch.zeros(0)  # its values
        self._sums: dict[tuple[str, ...], torch.Tensor] = {}
        self._counts = collections.Counter[tuple[str, ...]]()
        self._unchecked = collections.deque[Unchecked]()

    def note(self, names: tuple[str, ...], values: torch.Tensor) -> None:
        """One minibatch: what is shown of it, and a vector of that."""
        self.names, self.newest = names, values
        if names in self._sums:
            self._sums[names] += values
        else:
            self._sums[names] = values.clone()
        self._counts[names] += 1

    def close_batch(self, number: int) -> None:
        """The minibatches of batch `number` are all noted."""
        self._unchecked.append(Unchecked(number, self.names, Reading(self.newest)))

    def find_lost(self, keep: int = 0) -> str:
        """What became NaN or infinite and when, or "": looks at all batches but the newest `keep`."""
        while len(self._unchecked) > keep:
            number, names, values = self._unchecked.popleft()
            for name, value in zip(names, values.read().tolist(), strict=True):
                if name.endswith("loss") and not math.isfinite(value):
                    return f"the {name.replace('_', ' ')} became {value} at update {number}"
        return ""

    def take(self) -> dict[str, float]:
        """The means since the last time."""
        sums, counts = collections.Counter[str](), collections.Counter[str]()
        for names, total in self._sums.items():
            for name, value in zip(names, total.tolist(), strict=True):
                sums[name] += value
                counts[name] += self._counts[names]
        self._sums.clear()
        self._counts.clear()
        return {name: value / counts[name] for name, value in sums.items()}
