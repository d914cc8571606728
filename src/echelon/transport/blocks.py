"""Blocks: pieces of shared memory that carry the large messages of a line, written once and used again.

The writer of a line keeps a `BlockPool`, the reader a `BlockShelf` of those it has mapped. A block's one word says who
may write it: FREE, the writer may fill it, and sets TAKEN before it tells the reader; TAKEN, the reader alone may touch
it, and sets FREE once nothing made of it is left; RETIRED, the writer gave it up, and the reader drops its mapping.
So the word has one writer at a time. Pages are touched once and then reused: fresh ones cost more than the copy.

What bounds it: `POOL_BYTES` and `MOST_BLOCKS`; and in the long run what was needed at once, since a block that carried
nothing for `IDLE_S` goes before another one is made, and when the ring went round (`trim`, `sweep`). A line on which
nothing is sent any more keeps what it has until it is closed.

Nobody waits here: with all blocks taken `find` has none, and the line sends another way. A reader that dies keeps its
blocks taken until the writer closes the line. The reader takes a block's file away when it maps it, so that from then
on nothing is left behind however the two end.
"""

from __future__ import annotations

import bisect
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from echelon.errors import Refused, TransportError
from echelon.layout import ALIGNMENT
from echelon.transport.segments import create_segment, open_segment

Array = np.ndarray[Any, Any]
POOL_BYTES = 128 << 20  # of the blocks of one line, together
MOST_BLOCKS = 256  # of one line
LEAST_BYTES = 1 << 16
IDLE_S = 10.0  # fresh pages cost more than the copy, so a block outlives the pauses of whoever sends now and then
WASTE = 4  # a block may be this many times as large as what is put into it
FREE, TAKEN, RETIRED = range(3)


class SharedBlock:
    """One block as one of the two processes sees it."""

    def __init__(self, number: int, memory: Array) -> None:
        self.number, self.nbytes, self.room = number, memory.nbytes, memory[ALIGNMENT:]
        self.used_s = monotonic()  # when the writer filled it last
        self._state = memory[:8].view(np.int64).data  # plain integers are faster than numpy's

    @property
    def state(self) -> int:
        return self._state[0]

    @state.setter
    def state(self, state: int) -> None:
        self._state[0] = state


class BlockPool:
    """The writer's blocks; its calls take turns under the line's lock."""

    def __init__(self, folder: Path, name: str, most_bytes: int = POOL_BYTES) -> None:
        self._folder, self._name, self._most_bytes = folder, name, most_bytes
        self._blocks: list[SharedBlock] = []  # the smallest first
        self._num_made = 0
        self._full_until_s = 0.0  # shared memory has no room for more
        self.nbytes = 0

    def find(self, nbytes: int) -> SharedBlock | None:
        """A free block with room for `nbytes`, made if there is none; None if the pool may not grow any more."""
        for block in self._blocks:
            if nbytes <= block.room.nbytes <= WASTE * nbytes and block.state == FREE:
                block.used_s = monotonic()
                return block
        self.trim()
        size = size_class(nbytes)
        for block in self._blocks[::-1]:  # those of other sizes make way, the largest first
            if self._has_room(size):
                break
            if block.state == FREE:
                self._retire(block)
        return self._make(size) if self._has_room(size) else None

    def trim(self) -> None:
        """Gives up the blocks that carried nothing for a while."""
        idle_since = monotonic() - IDLE_S
        for block in list(self._blocks):
            if block.used_s < idle_since and block.state == FREE:
                self._retire(block)

    def _has_room(self, size: int) -> bool:
        return self.nbytes + size <= self._most_bytes and len(self._blocks) < MOST_BLOCKS

    def _make(self, size: int) -> SharedBlock | None:
        if monotonic() < self._full_until_s:
            return None
        self._num_made += 1
        try:
            memory = create_segment(block_path(self._folder, self._name, self._num_made), size)
        except (TransportError, OSError):  # there is no room for it: make do with what there is
            self._full_until_s = monotonic() + IDLE_S
            return None
        block = SharedBlock(self._num_made, memory)
        bisect.insort(self._blocks, block, key=lambda block: block.room.nbytes)
        self.nbytes += block.nbytes
        return block

    def _retire(self, block: SharedBlock) -> None:
        block.state = RETIRED
        self._blocks.remove(block)
        self.nbytes -= block.nbytes
        block_path(self._folder, self._name, block.number).unlink(missing_ok=True)

    def close(self, discard: bool) -> None:
        """Gives all blocks up; the memory of one goes when nothing made of it is left in the reader either.

        With `discard` also the files of blocks that the reader has not opened go.
        """
        for block in list(self._blocks):
            if discard or block.state == FREE:
                self._retire(block)
        self._blocks.clear()


class BlockShelf:
    """The reader's view of the blocks: mapped at first sight, given back when nothing made of them is left."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._blocks: dict[int, SharedBlock] = {}
        self._leases: dict[int, weakref.ref[Array]] = {}  # of the blocks that are taken
        self._pid = os.getpid()

    @property
    def nbytes(self) -> int:
        """What is mapped, apart from views that outlive their block's retirement."""
        return sum(block.nbytes for block in self._blocks.values())

    def lease(self, number: int, nbytes: int) -> memoryview:
        """The first `nbytes` of a block that the writer filled; the block is free again once all views of it died."""
        block = self._blocks.get(number) or self._map(number)
        if block.state != TAKEN or number in self._leases or not 0 <= nbytes <= block.room.nbytes:
            raise Refused(
                f"block {number} of line {self._name} was refused: it has {block.room.nbytes} bytes and state "
                f"{block.state}, and {nbytes} bytes are said to lie in it."
            )
        lease = block.room[:nbytes]  # an array of its own, so that its end can be told

        def give_back(_: object, getpid: Callable[[], int] = os.getpid, free: int = FREE) -> None:
            if getpid() == self._pid:  # in a fork of the reader the views are copies, the block is not
                self._leases.pop(number, None)
                block.state = free  # as an argument, like getpid: this may run when the interpreter has dropped both

        self._leases[number] = weakref.ref(lease, give_back)
        return lease.data

    def sweep(self) -> None:
        """Drops the blocks that the writer gave up."""
        for block in list(self._blocks.values()):
            if block.state == RETIRED:
                del self._blocks[block.number]

    def _map(self, number: int) -> SharedBlock:
        self.sweep()
        path = block_path(self._folder, self._name, number)
        block = self._blocks[number] = SharedBlock(number, open_segment(path))
        path.unlink(missing_ok=True)
        return block

    def close(self) -> None:
        """Forgets the blocks; what was made of them stays valid as long as it lives."""
        self._blocks.clear()


def block_path(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name}.{number}"


def size_class(nbytes: int) -> int:
    """The size of a block for `nbytes`: a quarter of a power of two more at most, so that blocks fit many messages."""
    nbytes = max(nbytes + ALIGNMENT, LEAST_BYTES)
    step = 1 << (nbytes - 1).bit_length() - 3
    return -(-nbytes // step) * step
