"""What a learner draws, and what learners tell each other so that their weights are those of one buffer.

Needs only numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from echelon.replay.layout import ReplayError
from echelon.replay.reader import Read

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Keys:
    """Which items: the shard of each, as the owner counts them, and its number there."""

    shard: Array  # (n,) int64
    number: Array  # (n,) int64

    def __len__(self) -> int:
        return len(self.number)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A batch; the largest weight is 1, and `max_weight` is what it was before it was divided by itself."""

    keys: Keys
    weights: Array  # (n,) float64
    max_weight: float
    fields: dict[str, Array]  # (n, ...), in memory of the batch's own


class Drawn(NamedTuple):
    """Which items were drawn, ascending by shard."""

    shard: Array  # (n,) int64
    number: Array  # (n,) int64
    priority: Array  # (n,) float64, to the power of alpha


@dataclass(frozen=True, slots=True)
class Mass:
    """What some shards weigh: the sum of priority**alpha, and the number of their items."""

    total: float = 0.0
    size: int = 0

    def __add__(self, other: Mass) -> Mass:
        return Mass(self.total + other.total, self.size + other.size)


class Part(NamedTuple):
    """What a draft reads from one shard."""

    shard: int
    where: slice  # of the batch
    read: Read


class Draft(NamedTuple):
    """A batch that is drawn and asked for, and not read yet."""

    drawn: Drawn
    reads: list[Part]
    mass: Mass  # of all shards when it was drawn
    beta: float
    rng: np.random.Generator  # for what has to be drawn again

    def is_ready(self) -> bool:
        """Whether reading it waits for nobody."""
        return all(part.read.is_ready() for part in self.reads)


def importance(priority: Array, mass: Mass, beta: float) -> tuple[Array, float]:
    """Weights (N * P)**-beta over the largest, and that one; P is an item's share of `mass`, N all its items."""
    weights = (priority * (mass.size / mass.total)) ** -beta
    largest = float(weights.max())
    weights /= largest
    return weights, largest


def apportion(batch: int, masses: Sequence[Mass], share: float) -> list[int]:
    """How many items of a batch each learner draws from its shards, in proportion to their masses.

    `share` (0 to 1) is one random number that all learners know; on average each gets exactly its part.
    """
    ends = np.cumsum([mass.total for mass in masses])
    if not math.isfinite(ends[-1]) or ends[-1] <= 0.0:
        raise ReplayError(f"a batch of {batch} cannot be apportioned to shards that weigh {ends[-1]}.")
    upto = np.floor(ends / ends[-1] * batch + share).astype(np.int64)
    upto[-1] = batch + int(np.floor(share))
    return [int(count) for count in np.diff(upto, prepend=0)]
