"""Sampled batches, and the masses that learners exchange so that importance weights are those of one buffer.

Imports only numpy.
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
    """The keys of items: the index of the shard among its owner's shards, and the number of the item in the shard."""

    shard: Array  # (n,) int64
    number: Array  # (n,) int64

    def __len__(self) -> int:
        return len(self.number)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A batch. The weights are normalized so that the largest is 1; `max_weight` is the largest before that."""

    keys: Keys
    weights: Array  # (n,) float64
    max_weight: float
    fields: dict[str, Array]  # (n, ...), owned by the batch


class Drawn(NamedTuple):
    """The drawn items, sorted by shard."""

    shard: Array  # (n,) int64
    number: Array  # (n,) int64
    priority: Array  # (n,) float64, to the power of alpha


@dataclass(frozen=True, slots=True)
class Mass:
    """The mass of some shards: the sum of priority**alpha over their items, and the number of items."""

    total: float = 0.0
    size: int = 0

    def __add__(self, other: Mass) -> Mass:
        return Mass(self.total + other.total, self.size + other.size)


class Part(NamedTuple):
    """The items of a draft that are read from one shard."""

    shard: int
    where: slice  # in the batch
    read: Read


class Draft(NamedTuple):
    """A batch that is drawn and requested, but not read yet."""

    drawn: Drawn
    reads: list[Part]
    mass: Mass  # of all shards at the time of the draw
    beta: float
    rng: np.random.Generator  # for drawing again in place of torn items

    def is_ready(self) -> bool:
        """Returns whether it can be read without waiting."""
        return all(part.read.is_ready() for part in self.reads)


def importance(priority: Array, mass: Mass, beta: float) -> tuple[Array, float]:
    """Returns the weights (N * P)**-beta divided by the largest, and the largest.

    P is an item's share of `mass.total`, N is `mass.size`.
    """
    weights = (priority * (mass.size / mass.total)) ** -beta
    largest = float(weights.max())
    weights /= largest
    return weights, largest


def apportion(batch: int, masses: Sequence[Mass], share: float) -> list[int]:
    """Returns how many items of a batch each learner draws from its shards, in proportion to their masses.

    `share` (0 to 1) is a random number that all learners share; in expectation each learner draws exactly its share.
    """
    ends = np.cumsum([mass.total for mass in masses])
    if not math.isfinite(ends[-1]) or ends[-1] <= 0.0:
        raise ReplayError(f"a batch of {batch} cannot be apportioned to shards with a total mass of {ends[-1]}.")
    upto = np.floor(ends / ends[-1] * batch + share).astype(np.int64)
    upto[-1] = batch + int(np.floor(share))
    return [int(count) for count in np.diff(upto, prepend=0)]
