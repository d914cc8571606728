"""Means of losses and metrics, and tensors that are read from the learner's device without waiting for it."""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

import numpy as np
import torch

from echelon.algorithms.protocol import TOTAL
from echelon.objectives.statistics import MOMENTS, explained_variance

Array = np.ndarray[Any, Any]


class Reading:
    """An asynchronous copy of a tensor from the learner's device; only `read` waits for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._copied = tensor.detach(), None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor.detach(), non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> Array:
        if self._copied is not None:
            self._copied.synchronize()
        array: Array = self._tensor.numpy()
        return array


class Unchecked(NamedTuple):
    """The last losses of a batch, not yet checked for NaN."""

    number: int  # of the batch
    names: tuple[str, ...]
    values: Reading


class LossAccount:
    """Means of the losses and metrics of many minibatches, accumulated on the device of the losses."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()  # of the newest minibatch
        self.newest = torch.zeros(0)  # its values
        self._sums: dict[tuple[str, ...], torch.Tensor] = {}
        self._counts = collections.Counter[tuple[str, ...]]()
        self._unchecked = collections.deque[Unchecked]()

    def note(self, names: tuple[str, ...], values: torch.Tensor) -> None:
        """Adds the named values of one minibatch."""
        self.names, self.newest = names, values
        if names in self._sums:
            self._sums[names] += values
        else:
            self._sums[names] = values.clone()
        self._counts[names] += 1

    def close_batch(self, number: int) -> None:
        """Marks the end of batch `number`, whose last minibatch `find_non_finite` will check."""
        self._unchecked.append(Unchecked(number, self.names, Reading(self.newest)))

    def find_non_finite(self, keep: int = 0) -> str:
        """Returns which loss became NaN or infinite and when, or "". Checks all batches except the newest `keep`."""
        while len(self._unchecked) > keep:
            number, names, values = self._unchecked.popleft()
            for name, value in zip(names, values.read().tolist(), strict=True):
                if name.startswith("loss.") and not math.isfinite(value):
                    part = name.removeprefix("loss.").replace("_", " ")
                    return f"the {'' if part == TOTAL else f'{part} '}loss became {value} at update {number}"
        return ""

    def take(self) -> dict[str, float]:
        """Returns the means since the last call; the explained variance is that of all entries since then."""
        sums, counts = collections.Counter[str](), collections.Counter[str]()
        for names, total in self._sums.items():
            for name, value in zip(names, total.tolist(), strict=True):
                sums[name] += value
                counts[name] += self._counts[names]
        self._sums.clear()
        self._counts.clear()
        means = {name: value / counts[name] for name, value in sums.items()}
        if means.keys() >= set(MOMENTS):
            means["explained_variance"] = explained_variance(*(means.pop(name) for name in MOMENTS))
        return means
