"""A sum tree over priorities, to draw items in proportion to them, a batch at a time.

Node j of a level is the sum of the `FAN_OUT` nodes from j * FAN_OUT on of the level below. The leaves are the lowest
level; the highest level has at most `MAX_TOP` nodes, which one binary search covers. A change recomputes the sums above
it from their children, so sums do not drift, and equal leaves give bit-identical sums whatever the order of the
changes.

Eight children fill one cache line. A larger fan-out means fewer levels but more additions in each: of the fan-outs from
2 to 128, measured over 2^20 leaves, 8 and 16 are the fastest.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from echelon.replay.layout import ReplayError

Array = np.ndarray[Any, Any]
FAN_OUT = 8
SHIFT = FAN_OUT.bit_length() - 1
MAX_TOP = 4096
MAX_PRIORITY = 1e30  # fits into a float32, and float64 sums of any number of them stay finite


def check_priorities(priorities: Array, where: str) -> None:
    """Raises ReplayError unless every priority is a number from 0 to `MAX_PRIORITY`."""
    if np.ndim(priorities) != 1:
        raise ReplayError(f"{where}: priorities have the shape {np.shape(priorities)}; there must be one per item.")
    if len(priorities) and not (np.minimum.reduce(priorities) >= 0.0 and np.maximum.reduce(priorities) <= MAX_PRIORITY):
        bad = ~((priorities >= 0.0) & (priorities <= MAX_PRIORITY))
        at = int(np.flatnonzero(bad)[0])
        raise ReplayError(
            f"{where}: priority {at} of {len(priorities)} is {priorities[at]}; it must be a number from 0 to "
            f"{MAX_PRIORITY:g}. Nothing was stored: look for a NaN or an infinity in the TD errors."
        )


class SumTree:
    """A tree of `capacity` priorities, initially 0, and their sums in float64."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ReplayError(f"sum tree: capacity={capacity} must be 1 or more.")
        self.capacity = capacity
        num_nodes = capacity
        levels = []
        while num_nodes > MAX_TOP:
            num_parents = -(-num_nodes >> SHIFT)
            levels.append(np.zeros(num_parents * FAN_OUT))
            num_nodes = num_parents
        levels.append(np.zeros(num_nodes))
        self._leaves = levels[0]
        # For each level below the top: its nodes grouped by parent (parents, FAN_OUT), and the level of the parents.
        self._below = [(level.reshape(-1, FAN_OUT), above) for level, above in itertools.pairwise(levels)]
        self._top = levels[-1]
        self._offsets = np.zeros(num_nodes + 1)  # prefix sums of the top level; the last is the total
        self._is_summed = True

    @staticmethod
    def size(capacity: int) -> int:
        """Returns the size in bytes of a tree of `capacity`."""
        num_nodes, nbytes = capacity, 0
        while num_nodes > MAX_TOP:
            num_nodes = -(-num_nodes >> SHIFT)
            nbytes += num_nodes * FAN_OUT * 8
        return nbytes + 16 * num_nodes

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(self._sums()[-1])

    def get(self, indices: Array) -> Array:
        return self._leaves.take(indices)

    def set(self, indices: Array, values: Array) -> None:
        """Sets the priority at each index; if an index occurs twice, its last value is used."""
        if len(indices) == 0:
            return
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= self.capacity:
            raise ReplayError(
                f"sum tree: index {low if low < 0 else high} is outside 0 to {self.capacity - 1}. Nothing was changed."
            )
        check_priorities(values, "sum tree")
        self._leaves[indices] = values
        for nodes, above in self._below:
            indices = indices >> SHIFT
            above[indices] = np.add.reduce(nodes.take(indices, 0), 1)
        self._is_summed = False

    def set_range(self, start: int, values: Array) -> None:
        """Sets the priorities from index `start` on; the caller has checked the values."""
        stop = start + len(values)
        assert 0 <= start <= stop <= self.capacity, f"items {start} to {stop} of {self.capacity}"
        if start == stop:
            return
        self._leaves[start:stop] = values
        for nodes, above in self._below:
            start, stop = start >> SHIFT, ((stop - 1) >> SHIFT) + 1
            np.add.reduce(nodes[start:stop], 1, out=above[start:stop])
        self._is_summed = False

    def _sums(self) -> Array:
        if not self._is_summed:
            np.add.accumulate(self._top, out=self._offsets[1:])
            self._is_summed = True
        return self._offsets

    def find(self, prefix_sums: Array) -> Array:
        """Returns the item that each prefix sum falls into; never an item of priority 0, whatever the rounding.

        A prefix sum x falls into the first item at which the running sum exceeds x. An item of priority 0 does not
        change the running sum, so it is never the first; and x is clamped below the total.
        """
        offsets = self._sums()
        if not offsets[-1] > 0.0:
            raise ReplayError(
                "sum tree: every priority is 0, so nothing can be sampled. Insert items with a priority above 0."
            )
        rest = np.minimum(np.maximum(prefix_sums, 0.0), np.nextafter(offsets[-1], 0.0))
        found: Array = offsets[1:].searchsorted(rest, "right")
        rest -= offsets.take(found)
        sums = np.zeros((FAN_OUT + 1, len(rest)))  # running sums over the children of each node
        columns = np.arange(len(rest))
        for nodes, _ in reversed(self._below):
            sums[1:] = nodes.take(found, 0).T
            for child in range(2, FAN_OUT + 1):  # numpy's own accumulate takes three times as long on short rows
                np.add(sums[child - 1], sums[child], out=sums[child])
            np.minimum(rest, np.nextafter(sums[-1], 0.0), out=rest)
            place = np.add.reduce(sums[1:] <= rest, 0, dtype=np.intp)
            rest -= sums[place, columns]
            found = (found << SHIFT) + place
        return found
