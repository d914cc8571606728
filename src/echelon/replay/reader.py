"""The learner's side of a shard: reading items in place, and the column of newest priorities. Needs only numpy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from echelon.layout import ALIGNMENT
from echelon.replay.layout import ItemBlock, ItemField, ShardLayout, SideRing, spans
from echelon.replay.shard import RESERVE, RINGS, Shard, join

Array = np.ndarray[Any, Any]


class PriorityColumn:
    """The newest priorities of a shard's items, written by the learner that owns the shard, in a segment of its own.

    `fed` counts the items that the learner has seen: below it the priorities here count, from it on the actor's. So a
    learner that is started again rebuilds its tree from it; where its predecessor died while it was taking in new
    items, `fed` has not moved, and the slots that it wrote belong to items that are gone.

    For a shard of another host it also keeps which shard that is (`birth`): one that was made anew there counts from 0
    again, so that what it has is numbered here from `offset` on, a multiple of the capacity, and what had been inserted
    before (`past`) is counted on.
    """

    def __init__(self, capacity: int, memory: Array | None = None) -> None:
        memory = np.zeros(self.size(capacity), np.uint8) if memory is None else memory
        self._words = memory[:32].view(np.int64).data
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

    @property
    def birth(self) -> int:
        return self._words[1]

    @property
    def offset(self) -> int:
        return self._words[2]

    @property
    def past(self) -> int:
        return self._words[3]

    def renew(self, birth: int, offset: int, past: int) -> None:
        """The shard is another one from now on."""
        self._words[2], self._words[3] = offset, past
        self._words[1] = birth  # last: a successor that finds the old one does it again


class Read(Protocol):
    """Items that were asked for and are being fetched, or lie where they can be read at once."""

    def is_ready(self) -> bool:
        """Whether `into` waits for nobody."""
        ...

    def into(self, block: ItemBlock) -> Array:
        """Copies the items into `block`, once; True for those that are whole. Raises PeerLost with their host."""
        ...


class Reader(Protocol):
    """What a learner needs of a shard, wherever that lies. `window` raises PeerLost while its host is lost."""

    name: str
    layout: ShardLayout
    column: PriorityColumn

    def window(self) -> tuple[int, int]:
        """The numbers of the items that are there: from the first to before the last."""
        ...

    def initial(self, start: int, stop: int) -> Array:
        """The actor's priorities of the items from `start` to before `stop`; torn where `window` passed them."""
        ...

    def ask(self, numbers: Array) -> Read:
        """Asks for the items of `numbers`."""
        ...

    def send(self) -> None:
        """What was asked for goes on its way; readers of one host share it."""
        ...


class ReadInPlace(NamedTuple):
    """Items of a shard in the same memory: they are copied when they are wanted."""

    reader: ShardReader
    numbers: Array

    def is_ready(self) -> bool:
        return True

    def into(self, block: ItemBlock) -> Array:
        return self.reader.read(self.numbers, block)


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

    def ask(self, numbers: Array) -> Read:
        return ReadInPlace(self, numbers)

    def send(self) -> None:
        """Nothing travels."""

    def read(self, numbers: Array, block: ItemBlock) -> Array:
        """Copies the items of `numbers` into `block`; True for those that are whole."""
        shard = self.shard
        shard.items.gather(numbers, block.rows)
        for f, index in self._references:
            if f.stack:
                side = shard.sides[index]
                frames = block.rows[f.name].reshape(-1)
                side.gather(frames, block.stacks[f.name].reshape(-1).view(side.records.dtype))
        return self.whole(numbers, block.rows)

    def whole(self, numbers: Array, rows: Array) -> Array:
        """True for the items of `numbers` that were whole when they, and what they refer to, were copied to `rows`."""
        words = self.shard.words
        whole: Array = numbers >= words[RESERVE] - self.layout.capacity
        for f, index in self._references:
            oldest = rows[f.name].reshape(len(numbers), -1).min(1)
            whole &= oldest >= words[RINGS + index] - self._rings[index].capacity
        return whole

    def read_side(self, ring: str, numbers: Array) -> Array:
        """The rows of `numbers` in a side ring; where it matters whether they tore, `read` of their items says so."""
        index = next(i for i, side in enumerate(self._rings) if side.name == ring)
        rows = np.empty(len(numbers), self._rings[index].row)
        self.shard.sides[index].gather(numbers, rows)
        return rows


class Seen:
    """The shards of several learners, as far as each has taken its own in: for the one that counts or saves them all.

    It changes nothing, so it stands beside the learners' own replays.
    """

    def __init__(self, readers: Sequence[ShardReader], alpha: float) -> None:
        self.readers, self.alpha, self.layout = list(readers), alpha, readers[0].layout

    def window(self, shard: int) -> tuple[int, int]:
        """The numbers of the items of `shard` that can be drawn: from the first to before the last."""
        reader = self.readers[shard]
        tail, fed = reader.window()[0], reader.column.fed
        return min(tail, fed), fed

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in map(self.window, range(len(self.readers))))
