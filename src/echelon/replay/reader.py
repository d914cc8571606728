"""The learner's side of a shard: readers of its items, and the column of newest priorities. Imports only numpy."""

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
    """The newest priorities of a shard's items, in a separate segment that the learner owning the shard writes.

    `fed` counts the items that the learner has added to its tree: below `fed` the priorities in this column are valid,
    from `fed` on the actor's initial priorities. A restarted learner rebuilds its tree from the column. If its
    predecessor died while it added new items, `fed` has not moved, and the slots it wrote belong to evicted items.

    For a shard of another host the column also identifies the shard (`birth`). A shard that was created again counts
    from 0, so its items are numbered here from `offset` on, a multiple of the capacity, and the number of items that
    had been inserted before (`past`) is added to its count.
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
        """Records that a new shard has replaced the old one."""
        self._words[2], self._words[3] = offset, past
        self._words[1] = birth  # last: a successor that finds the old birth repeats the call


class Read(Protocol):
    """Requested items that are being fetched, or that can be read in place."""

    def is_ready(self) -> bool:
        """Returns whether `into` returns without waiting."""
        ...

    def into(self, block: ItemBlock) -> Array:
        """Copies the items into `block`; call it once. Returns True for each item that is whole.

        Raises PeerLost if their host is lost.
        """
        ...


class Reader(Protocol):
    """A learner's access to a shard on any host. `window` raises PeerLost while the host is lost."""

    name: str
    layout: ShardLayout
    column: PriorityColumn

    def window(self) -> tuple[int, int]:
        """Returns the range of stored item numbers: the first, and one past the last."""
        ...

    def initial(self, start: int, stop: int) -> Array:
        """Returns the actor's priorities of items `start` to `stop` (exclusive); invalid for evicted items."""
        ...

    def ask(self, numbers: Array) -> Read:
        """Requests the items with these `numbers`; `send` sends the request."""
        ...

    def send(self) -> None:
        """Sends the requests made with `ask`; the readers of one host share one message."""
        ...


class ReadInPlace(NamedTuple):
    """Items of a shard on this host; `into` copies them from shared memory."""

    reader: ShardReader
    numbers: Array

    def is_ready(self) -> bool:
        return True

    def into(self, block: ItemBlock) -> Array:
        return self.reader.read(self.numbers, block)


class ShardReader:
    """The learner's side of a shard on this host."""

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
        """Does nothing: items on this host are read in place."""

    def read(self, numbers: Array, block: ItemBlock) -> Array:
        """Copies the items with these `numbers` into `block`; returns True for each item that is whole."""
        shard = self.shard
        shard.items.gather(numbers, block.rows)
        for f, index in self._references:
            if f.stack:
                side = shard.sides[index]
                frames = block.rows[f.name].reshape(-1)
                side.gather(frames, block.stacks[f.name].reshape(-1).view(side.records.dtype))
        return self.whole(numbers, block.rows)

    def whole(self, numbers: Array, rows: Array) -> Array:
        """Returns True for each item that, with the rows it refers to, was not overwritten before it was copied."""
        words = self.shard.words
        whole: Array = numbers >= words[RESERVE] - self.layout.capacity
        for f, index in self._references:
            oldest = rows[f.name].reshape(len(numbers), -1).min(1)
            whole &= oldest >= words[RINGS + index] - self._rings[index].capacity
        return whole

    def read_side(self, ring: str, numbers: Array) -> Array:
        """Returns rows of a side ring, unchecked: `read` of the items that refer to them finds torn rows."""
        index = next(i for i, side in enumerate(self._rings) if side.name == ring)
        rows = np.empty(len(numbers), self._rings[index].row)
        self.shard.sides[index].gather(numbers, rows)
        return rows


class Seen:
    """A read-only view of the shards of several learners, for the learner that counts or saves all of them.

    It covers the items that each owning learner has added to its tree. It changes nothing, so it can be used while the
    learners use their replays.
    """

    def __init__(self, readers: Sequence[ShardReader], alpha: float) -> None:
        self.readers, self.alpha, self.layout = list(readers), alpha, readers[0].layout

    def window(self, shard: int) -> tuple[int, int]:
        """Returns the range of item numbers of `shard` that can be sampled: the first, and one past the last."""
        reader = self.readers[shard]
        tail, fed = reader.window()[0], reader.column.fed
        return min(tail, fed), fed

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in map(self.window, range(len(self.readers))))
