"""The learner's side of a shard: reading items in place, and the column of newest priorities. Needs only numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from echelon.layout import ALIGNMENT
from echelon.replay.layout import Block, ItemField, ShardLayout, SideRing, spans
from echelon.replay.shard import RESERVE, RINGS, Shard, join

Array = np.ndarray[Any, Any]


class PriorityColumn:
    """The newest priorities of a shard's items, written by the learner that owns the shard, in a segment of its own.

    `fed` counts the items that the learner has seen: below it the priorities here count, from it on the actor's. So a
    learner that is started again rebuilds its tree from it; where its predecessor died while it was taking in new
    items, `fed` has not moved, and the slots that it wrote belong to items that are gone.
    """

    def __init__(self, capacity: int, memory: Array | None = None) -> None:
        memory = np.zeros(self.size(capacity), np.uint8) if memory is None else memory
        self._words = memory[:8].view(np.int64).data
        self.priorities = memory[ALIGNMENT : ALIGNMENT + 8 * capacity].view(np.float64)

    @staticmethod
    def size(capacity: int) -> int:
        return ALIGNMENT + 8 * capacity

    @classmethod
    def at(cls, folder: Path, index: int, capacity: int) -> PriorityColumn:
        return cls(capacity, join(folder / f"priorities-{index}", cls.size(capacity)))

    @property
    def fed(self) -> int:
        return self._words[0]

    @fed.setter
    def fed(self, count: int) -> None:
        self._words[0] = count


class Reader(Protocol):
    """What a learner needs of a shard, wherever that lies. Any method raises PeerLost once its host is lost."""

    name: str
    layout: ShardLayout
    column: PriorityColumn

    def window(self) -> tuple[int, int]:
        """The numbers of the items that are there: from the first to before the last."""
        ...

    def initial(self, start: int, stop: int) -> Array:
        """The actor's priorities of the items from `start` to before `stop`; torn where `window` passed them."""
        ...

    def read(self, numbers: Array, block: Block) -> Array:
        """Copies the items of `numbers` into `block`; True for those that are whole."""
        ...


class ShardReader:
    """The learner's side of a shard in the same memory."""

    def __init__(self, shard: Shard, column: PriorityColumn | None = None) -> None:
        self.shard, self.layout, self.name = shard, shard.layout, shard.name
        self.column = column or PriorityColumn(shard.layout.capacity)
        self.window = shard.window
        rings = {ring.name: index for index, ring in enumerate(shard.layout.rings)}
        self._references: list[tuple[ItemField, int]] = [(f, rings[f.ring]) for f in shard.layout.fields if f.ring]
        self._rings: list[SideRing] = list(shard.layout.rings)

    @classmethod
    def at(cls, folder: Path, index: int, layout: ShardLayout) -> ShardReader:
        return cls(Shard.at(folder, index, layout), PriorityColumn.at(folder, index, layout.capacity))

    def initial(self, start: int, stop: int) -> Array:
        pieces = [self.shard.initial[slots] for slots, _ in spans(start, stop, self.layout.capacity)]
        return pieces[0].copy() if len(pieces) == 1 else np.concatenate(pieces)

    def read(self, numbers: Array, block: Block) -> Array:
        shard = self.shard
        shard.items.gather(numbers, block.rows)
        oldest = []
        for f, index in self._references:
            needed = block.rows[f.name].reshape(len(numbers), -1)
            if f.stack:
                side = shard.sides[index]
                side.gather(needed.reshape(-1), block.stacks[f.name].reshape(-1).view(side.records.dtype))
            oldest.append((needed.min(1), index))
        whole: Array = numbers >= shard.words[RESERVE] - self.layout.capacity
        for needed, index in oldest:
            whole &= needed >= shard.words[RINGS + index] - self._rings[index].capacity
        return whole

    def read_side(self, ring: str, numbers: Array) -> dict[str, Array]:
        """The rows of `numbers` in a side ring; where it matters whether they tore, `read` of their items says so."""
        index = next(i for i, side in enumerate(self._rings) if side.name == ring)
        rows = np.empty(len(numbers), self._rings[index].row)
        self.shard.sides[index].gather(numbers, rows)
        return {name: rows[name] for name in rows.dtype.names or ()}
