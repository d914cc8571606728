"""What a learner draws, and what learners tell each other so that their weights are those of one buffer.

Needs only numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.replay.layout import ReplayError

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


@dataclass(frozen=True, slots=True)
class Mass:
    """What some shards weigh: the sum of priority**alpha, and the number of their items."""

    total: float = 0.0
    size: int = 0

    def __add__(self, other: Mass) -> Mass:
        return Mass(self.total + other.total, self.size + other.size)


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
