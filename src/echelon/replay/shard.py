"""A replay shard: one actor's ring of items in shared memory, which learners read in place.

Items are numbered from 0 in the order in which they are appended; item n is stored in slot n % capacity. So (shard,
number) identifies an item permanently, and a late priority for a slot that holds another item by now is recognized by
its number.

Shared words, all written by the actor: `head` counts the items that readers may read. `reserve` moves before rows are
overwritten: an item below reserve - capacity is overwritten or about to be. `tail` is the first item whose rows in the
side rings are all intact; it moves before they are overwritten. Every side ring has its own `reserve`. A reader copies
rows, then checks the reserves to find which rows are torn.

No process waits here: the actor overwrites its oldest items whether they were read or not. If the actor dies, its items
stay; once it is reaped, its successor continues at `head`. Imports only numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from echelon.errors import TransportError
from echelon.memory_check import check_fits, free_memory
from echelon.replay.layout import ReplayError, ShardLayout, spans
from echelon.replay.sum_tree import check_priorities
from echelon.transport.segments import join_segment

Array = np.ndarray[Any, Any]
HEAD, RESERVE, TAIL, RINGS = 0, 1, 2, 3
LOOK_AHEAD = 1024  # items that one step of `_evict` checks


class Rows:
    """A ring of rows, viewed as records and by field."""

    def __init__(self, memory: Array, row: np.dtype[Any], capacity: int) -> None:
        self.capacity = capacity
        self.records = memory.view(row)
        self.columns = {name: self.records[name] for name in row.names or ()}

    def write(self, number: int, fields: Mapping[str, Array], count: int) -> None:
        slot = number % self.capacity
        if slot + count <= self.capacity:
            for name, column in self.columns.items():
                column[slot : slot + count] = fields[name]
            return
        for slots, rows in spans(number, number + count, self.capacity):
            for name, column in self.columns.items():
                column[slots] = fields[name][rows]

    def gather(self, numbers: Array, out: Array) -> None:
        """Copies the slots of the rows with these `numbers` into `out` (n,), even if they were overwritten."""
        self.records.take(numbers % self.capacity, out=out, mode="clip")


class Shard:
    """The memory of a shard, as mapped by the actor and by every reader."""

    def __init__(
        self,
        layout: ShardLayout,
        memory: Array | None = None,
        name: str = "replay shard 0",
        lower: str = "replay.capacity",
    ) -> None:
        """Wraps the `memory` of a segment; without it, allocates private memory for a buffer within one process.

        `lower` names the setting that an out-of-memory error tells the user to lower.
        """
        self.layout, self.name = layout, name
        if memory is None:
            check_fits(layout.nbytes, f"{name} of {layout.capacity} items", free_memory(), lower)
        parts = layout.parts(np.zeros(layout.nbytes, np.uint8) if memory is None else memory)
        self.words = parts["words"].view(np.int64).data  # plain integers are faster than numpy's
        self.items = Rows(parts["rows"], layout.row, layout.capacity)
        self.initial = parts["initial"].view(np.float64)
        self.oldest = [parts[f"oldest.{ring.name}"].view(np.int64) for ring in layout.rings]
        self.sides = [Rows(parts[f"ring.{ring.name}"], ring.row, ring.capacity) for ring in layout.rings]

    @classmethod
    def at(cls, folder: Path, index: int, layout: ShardLayout) -> Shard:
        """Opens shard `index` of a run; the first process creates it."""
        path = folder / f"replay-{index}"
        if not path.exists():
            check_fits(layout.nbytes, f"replay shard {index} of {layout.capacity} items", free_memory(folder))
        return cls(layout, join(path, layout.nbytes), f"replay shard {index}")

    @property
    def head(self) -> int:
        return self.words[HEAD]

    def window(self) -> tuple[int, int]:
        """Returns the range of stored item numbers: the first, and one past the last."""
        words, head = self.words, -1
        while head != words[HEAD]:  # retry after a concurrent append, or a shard just overwritten would look empty
            head = words[HEAD]
            tail = max(words[TAIL], words[RESERVE] - self.layout.capacity)
        return min(head, tail), head


def join(path: Path, nbytes: int) -> Array:
    """Opens the segment at `path`, or creates it; raises TransportError if it has another size."""
    memory = join_segment(path, nbytes)
    if memory.nbytes != nbytes:
        raise TransportError(
            f"segment {path} has {memory.nbytes} bytes where {nbytes} are expected: it was created for other spaces or "
            "another replay.capacity."
        )
    return memory


class ShardWriter:
    """The actor's side: appends items without waiting. One process at a time uses it."""

    def __init__(self, shard: Shard) -> None:
        self.shard, self.layout = shard, shard.layout
        self._capacity = shard.layout.capacity
        self._checks = [(f.name, *f.in_row) for f in shard.layout.fields]
        self._rings = {ring.name: index for index, ring in enumerate(shard.layout.rings)}
        self._references = [(f, self._rings[f.ring]) for f in shard.layout.fields if f.ring]

    @property
    def head(self) -> int:
        return self.shard.head

    def append(self, fields: Mapping[str, Array], priorities: Array) -> int:
        """Appends items of `fields` (n, ...) with their initial priorities (n,); returns the number of the first item.

        A stack of frames is passed as the frame numbers (n, stack) that `FrameWriter.store` returned.
        """
        shard, words, count = self.shard, self.shard.words, len(priorities)
        self._check(fields, count)
        check_priorities(priorities, shard.name)
        head = words[HEAD]
        words[RESERVE] = max(words[RESERVE], head + count)  # a predecessor may have died after reserving more
        shard.items.write(head, fields, count)
        slot = head % self._capacity
        if slot + count <= self._capacity:
            shard.initial[slot : slot + count] = priorities
        else:
            for slots, rows in spans(head, head + count, self._capacity):
                shard.initial[slots] = priorities[rows]
        if self._references:
            self._refer(fields, head, count)
        words[HEAD] = head + count
        return head

    def clear(self) -> None:
        """Removes every item; their numbers are not reused."""
        self.shard.words[TAIL] = self.shard.head

    def _check(self, fields: Mapping[str, Array], count: int) -> None:
        """Raises ReplayError for items that do not fit the layout, before anything is changed."""
        where = self.shard.name
        if count > self._capacity:
            raise ReplayError(
                f"{where}: an append of {count} items exceeds its capacity of {self._capacity}. Append fewer items per "
                "call."
            )
        for name, shape, dtype in self._checks:
            value = fields.get(name)
            if value is None:
                raise ReplayError(f"{where}: field {name} is missing; the fields given are {sorted(fields)}.")
            if value.shape != (count, *shape) or (
                value.dtype != dtype and not np.can_cast(value.dtype, dtype, "same_kind")
            ):
                raise ReplayError(
                    f"{where}: field {name} is {value.shape} of {value.dtype}, expected {(count, *shape)} of {dtype}. "
                    "Are the spaces those that the run started with?"
                )
        if len(fields) > len(self._checks):
            known = {name for name, *_ in self._checks}
            raise ReplayError(
                f"{where}: it has no field {sorted(set(fields) - known)}; its fields are {sorted(known)}."
            )

    def _refer(self, fields: Mapping[str, Array], head: int, count: int) -> None:
        """Records, for each new item, the oldest row that it refers to in every side ring."""
        for column in self.shard.oldest:
            for slots, _ in spans(head, head + count, self._capacity):
                column[slots] = np.iinfo(np.int64).max
        for f, index in self._references:
            oldest = fields[f.name].reshape(count, -1).min(1)
            column = self.shard.oldest[index]
            for slots, rows in spans(head, head + count, self._capacity):
                np.minimum(column[slots], oldest[rows], out=column[slots])

    def store(self, ring: str, fields: Mapping[str, Array], count: int) -> int:
        """Appends `count` rows to a side ring; returns the number of the first. Items may refer to them from now on."""
        index = self._rings[ring]
        side, words = self.shard.sides[index], self.shard.words
        if count > side.capacity:
            raise ReplayError(
                f"{self.shard.name}: an append of {count} rows exceeds the {side.capacity} of ring {ring}. Enlarge it."
            )
        number = words[RINGS + index]
        self._evict(index, number + count - side.capacity)
        words[RINGS + index] = number + count
        side.write(number, fields, count)
        return number

    def is_kept(self, ring: str, number: int, count: int) -> bool:
        """Returns whether the row with that number will still be stored after `count` more rows."""
        index = self._rings[ring]
        return number >= self.shard.words[RINGS + index] + count - self.shard.sides[index].capacity

    def _evict(self, index: int, limit: int) -> None:
        """Moves `tail` past the items that refer to a row below `limit`."""
        words, oldest = self.shard.words, self.shard.oldest[index]
        if limit <= 0:
            return
        head = words[HEAD]
        tail = start = max(words[TAIL], head - self._capacity)
        while start < head:
            # Row numbers increase with the items, but not strictly: the items of several environments are interleaved.
            ahead = np.arange(start, min(head, start + LOOK_AHEAD))
            gone = np.flatnonzero(oldest[ahead % self._capacity] < limit)
            if len(gone) == 0:
                break
            tail = start = start + int(gone[-1]) + 1
        words[TAIL] = tail
