"""Blocks: reusable segments of shared memory that carry the large messages of a line.

The writer of a line owns a `BlockPool`; the reader keeps the blocks it has mapped in a `BlockShelf`. One word of a
block holds its state. FREE: the writer may fill the block; it sets TAKEN before it sends the block's number. TAKEN:
only the reader may access the block; it sets FREE when no view of it is left. RETIRED: the writer has dropped the
block, and the reader unmaps it. So the word has one writer at a time. Blocks are reused because faulting in fresh pages
costs more than the copy.

What bounds the pool: `POOL_BYTES` and `MOST_BLOCKS`. In the long run it shrinks to the blocks in use at the same time:
a block that was idle for `IDLE_S` is retired before another one is made, and each time the ring wraps around (`trim`
in the writer, `sweep` in the reader). A line on which nothing is sent any longer keeps its blocks until it is closed.

Nothing blocks here: when all blocks are taken, `find` returns None and the line sends the message through its ring. If
the reader dies, its blocks stay taken until the writer closes the line. The reader unlinks a block's file when it maps
it, so no file is left behind however the two processes end.
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
POOL_BYTES = 128 << 20  # total size of the blocks of one line
MOST_BLOCKS = 256  # per line
LEAST_BYTES = 1 << 16
IDLE_S = 10.0  # fresh pages cost more than the copy, so a block outlives the pauses of an occasional sender
WASTE = 4  # a block may be this many times as large as the message in it
FREE, TAKEN, RETIRED = range(3)


class SharedBlock:
    """One block, as mapped by the writer or the reader."""

    def __init__(self, number: int, memory: Array) -> None:
        self.number, self.nbytes, self.room = number, memory.nbytes, memory[ALIGNMENT:]
        self.used_s = monotonic()  # when the writer last filled it
        self._state = memory[:8].view(np.int64).data  # plain integers are faster than numpy's

    @property
    def state(self) -> int:
        return self._state[0]

    @state.setter
    def state(self, state: int) -> None:
        self._state[0] = state


class BlockPool:
    """The writer's blocks; every call is made under the line's lock."""

    def __init__(self, folder: Path, name: str, most_bytes: int = POOL_BYTES) -> None:
        self._folder, self._name, self._most_bytes = folder, name, most_bytes
        self._blocks: list[SharedBlock] = []  # sorted by size, the smallest first
        self._num_made = 0
        self._full_until_s = 0.0  # until then no allocation is tried: shared memory was full
        self.nbytes = 0

    def find(self, nbytes: int) -> SharedBlock | None:
        """Returns a free block with room for `nbytes`, made if there is none; None if the pool cannot grow."""
        for block in self._blocks:
            if nbytes <= block.room.nbytes <= WASTE * nbytes and block.state == FREE:
                block.used_s = monotonic()
                return block
        self.trim()
        size = size_class(nbytes)
        for block in self._blocks[::-1]:  # evict blocks of other sizes, the largest first
            if self._has_room(size):
                break
            if block.state == FREE:
                self._retire(block)
        return self._make(size) if self._has_room(size) else None

    def trim(self) -> None:
        """Retires the free blocks that were idle for `IDLE_S`."""
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
        except (TransportError, OSError):  # shared memory is full: continue with the existing blocks
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
        """Drops all blocks; the memory of a block is freed once the reader holds no view of it either.

        With `discard`, also removes the files of blocks that the reader has not opened.
        """
        for block in list(self._blocks):
            if discard or block.state == FREE:
                self._retire(block)
        self._blocks.clear()


class BlockShelf:
    """The reader's blocks: mapped on first use, released when no view of them is left."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._blocks: dict[int, SharedBlock] = {}
        self._leases: dict[int, weakref.ref[Array]] = {}  # one for each taken block
        self._pid = os.getpid()

    @property
    def nbytes(self) -> int:
        """The bytes of the mapped blocks, without retired blocks that views keep alive."""
        return sum(block.nbytes for block in self._blocks.values())

    def lease(self, number: int, nbytes: int) -> memoryview:
        """Returns the first `nbytes` of a block that the writer filled; it is freed when no view of it is left."""
        block = self._blocks.get(number) or self._map(number)
        if block.state != TAKEN or number in self._leases or not 0 <= nbytes <= block.room.nbytes:
            raise Refused(
                f"block {number} of line {self._name} was refused: it has {block.room.nbytes} bytes and state "
                f"{block.state}, and the line announces {nbytes} bytes in it."
            )
        lease = block.room[:nbytes]  # a separate array object, for the weak reference below

        # Default arguments, because this may run at interpreter exit, after the module's globals are cleared.
        def release(_: object, getpid: Callable[[], int] = os.getpid, free: int = FREE) -> None:
            if getpid() == self._pid:  # a fork of the reader has copies of the views, but shares the block
                self._leases.pop(number, None)
                block.state = free

        self._leases[number] = weakref.ref(lease, release)
        return lease.data

    def sweep(self) -> None:
        """Unmaps the blocks that the writer retired."""
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
        """Forgets the blocks; existing views of them stay valid."""
        self._blocks.clear()


def block_path(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name}.{number}"


def size_class(nbytes: int) -> int:
    """Returns the size of a block for `nbytes`: rounded up by at most a quarter, so that similar sizes share blocks."""
    nbytes = max(nbytes + ALIGNMENT, LEAST_BYTES)
    step = 1 << (nbytes - 1).bit_length() - 3
    return -(-nbytes // step) * step
