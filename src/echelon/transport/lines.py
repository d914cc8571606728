"""Lines: ordered messages from one process to another on the same host, through shared memory.

A message is a list of buffers, as returned by `codec.encode`, stored end to end (`ring.py`). A small message goes into
a ring. A large message is copied once into a block (`blocks.py`), where the reader uses it in place, and the ring
carries the block's number. If no block is free, a large message goes through the ring in pieces.

Shared words, each with one writer: the writer's `head` counts the bytes written to the ring, the reader's `tail` the
bytes read from it. A record is complete before `head` passes it, and the reader returns a message only with its last
record, so a writer that dies leaves only whole messages. `coming` is set while a large message is being copied. The
reader sleeps on `bell`, the writer on `room`. These two words count nothing, so a process may also wake its own
threads: even values are written by the other side, odd values by its own.

Who waits: the reader waits for a message; `send`, `wake` and the writer's `close` wake it. The writer waits for room in
the ring (never for a block, so it depends only on the reader's next `receive`); it is woken when half of the ring is
empty, and by `close` on either side. Each side checks again after it has announced that it sleeps, and the other side
looks for a sleeper after it has moved its word, both with a fence in between, so no wake-up is lost. The reader spins
before it sleeps. It is woken before a large message is copied, not after, so that it is awake when the copy is done.

If the reader dies, the ring fills up and `send` returns False after its timeout. If the writer dies, `receive` returns
the messages that were sent completely and then waits for its timeout: the process that detects the death calls `wake`.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from echelon.errors import Refused
from echelon.transport.blocks import TAKEN, BlockPool, BlockShelf
from echelon.transport.futex import fence
from echelon.transport.ring import (
    BEGIN,
    BLOCK,
    CLOSED,
    COMING,
    END,
    HEAD,
    LINE_BYTES,
    MESSAGE,
    MIDDLE,
    PIECE_BYTES,
    RECORD,
    RING_BYTES,
    SKIP,
    SLEEPS,
    Buffer,
    Ring,
    body_bytes,
    frames_of,
    padded,
    write_body,
)
from echelon.transport.segments import create_segment, open_segment

# A reader spins for SPIN_S before it sleeps if its last wait was shorter than BRISK_S: a sleep costs each side about
# 30 us more, but a reader that waits long must not burn a core.
SPIN_S = 60e-6
BRISK_S = 120e-6
COMING_S = 1e-3  # how long it spins for a large message that is being copied
NUM_LOOKS = 8  # reads of `head` between two calls of sched_yield


class LineWriter:
    """The sending end of a line, usable from any thread; it creates the line, which the reader then opens by name."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path, self.name = folder / name, name
        self._line = Ring(create_segment(self._path, LINE_BYTES), name)
        self._pool = BlockPool(folder, name)
        self._lock = threading.Lock()
        self._head = self._num_rings = 0
        self._closed = False

    @property
    def block_bytes(self) -> int:
        """The bytes of shared memory that the blocks of this line take."""
        return self._pool.nbytes

    @property
    def abandoned(self) -> bool:
        """Whether the reader has closed its end."""
        return bool(self._line.reader[CLOSED])

    def send(self, frames: Sequence[Buffer], timeout_s: float, go_on: Callable[[], bool] = lambda: False) -> bool:
        """Sends one message; the buffers may be changed afterwards.

        Returns False if it was not sent: the reader read nothing for `timeout_s`, or has closed its end. If the timeout
        passes when some pieces of a large message are already sent, `go_on` decides whether to keep waiting: a message
        that starts over at every timeout might never complete.
        """
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            return False
        try:
            lengths = [len(frame) for frame in frames]
            nbytes = body_bytes(lengths)
            if nbytes <= PIECE_BYTES:
                at = self._reserve(nbytes, timeout_s)
                if at < 0:
                    return False
                write_body(self._line.records, at + RECORD.size, frames, lengths)
                self._publish(at, MESSAGE, nbytes)
                return True
            return self._send_large(frames, lengths, nbytes, timeout_s, go_on)
        finally:
            self._lock.release()

    def _send_large(
        self, frames: Sequence[Buffer], lengths: list[int], nbytes: int, timeout_s: float, go_on: Callable[[], bool]
    ) -> bool:
        if self._closed or self.abandoned:
            return False
        block = self._pool.find(nbytes)
        at = self._reserve(PIECE_BYTES if block is None else RECORD.size, timeout_s)
        if at < 0:
            return False
        if block is None:
            body = bytearray(nbytes)
            write_body(memoryview(body), 0, frames, lengths)
            return self._send_parts(memoryview(body), timeout_s, go_on)
        self._announce()
        write_body(block.room.data, 0, frames, lengths)
        RECORD.pack_into(self._line.records, at + RECORD.size, block.number, nbytes)
        block.state = TAKEN
        self._publish(at, BLOCK, RECORD.size)
        return True

    def _send_parts(self, body: memoryview, timeout_s: float, go_on: Callable[[], bool]) -> bool:
        """Sends `body` through the ring in pieces; if it is cut off, the reader drops the pieces it has."""
        for start in range(0, len(body), PIECE_BYTES):
            piece = body[start : start + PIECE_BYTES]
            while (at := self._reserve(len(piece), timeout_s)) < 0:
                if self._closed or self.abandoned or not go_on():
                    return False
            self._line.records[at + RECORD.size : at + RECORD.size + len(piece)] = piece
            end = start + len(piece) == len(body)
            self._publish(at, BEGIN if start == 0 else END if end else MIDDLE, len(piece))
        return True

    def _reserve(self, nbytes: int, timeout_s: float) -> int:
        """Waits for room for a record of `nbytes`; returns its position in the ring, or -1 if the wait failed."""
        line, size = self._line, RECORD.size + padded(nbytes)
        at = self._head % RING_BYTES
        skipped = RING_BYTES - at if at + size > RING_BYTES else 0
        full = self._head + skipped + size - RING_BYTES  # there is room once `tail` reaches this
        if self._closed or line.reader[CLOSED] or (line.reader[HEAD] < full and not self._wait(full, timeout_s)):
            return -1
        if skipped:
            RECORD.pack_into(line.records, at, SKIP, 0)
            self._head += skipped
        return self._head % RING_BYTES

    def _wait(self, full: int, timeout_s: float) -> bool:
        line = self._line
        deadline, tail = time.monotonic() + timeout_s, line.reader[HEAD]
        while (now := line.reader[HEAD]) < full:
            if now != tail:
                deadline, tail = time.monotonic() + timeout_s, now
            left_s = deadline - time.monotonic()
            if left_s <= 0.0:
                return False
            seen = line.room.value
            line.writer[SLEEPS] = 1
            fence()
            if self._closed or line.reader[CLOSED]:
                return False
            if line.reader[HEAD] < full:
                line.room.wait(seen, left_s)
            line.writer[SLEEPS] = 0
        return True

    def _publish(self, at: int, kind: int, nbytes: int) -> None:
        """Makes the record at `at` visible to the reader, and wakes the reader if it sleeps."""
        line = self._line
        RECORD.pack_into(line.records, at, kind, nbytes)
        self._head += RECORD.size + padded(nbytes)
        line.writer[HEAD] = self._head
        line.writer[COMING] = 0
        fence()
        if line.reader[SLEEPS]:
            self._ring()
        if at == 0:  # the ring has wrapped around
            self._pool.trim()

    def _announce(self) -> None:
        """Wakes the reader before a large message is copied: the copy takes longer than the wake-up."""
        self._line.writer[COMING] = 1
        fence()
        if self._line.reader[SLEEPS]:
            self._ring()

    def _ring(self) -> None:
        self._num_rings += 2
        self._line.bell.value = self._num_rings & 0x7FFFFFFF
        self._line.bell.wake()

    def close(self, discard: bool = False) -> None:
        """Closes the line; the reader still receives the messages already sent.

        With `discard`, removes the line's files: no reader will open it. A `send` that waits in another thread returns
        False.
        """
        if self._closed:
            return
        self._closed = True
        line = self._line
        line.room.value = (line.room.value + 1 | 1) & 0x7FFFFFFF
        line.room.wake()
        with self._lock:
            line.writer[CLOSED] = 1
            self._ring()
            self._pool.close(discard)
            if discard:
                self._path.unlink(missing_ok=True)


class LineReader:
    """The receiving end of a line, used by one thread at a time; it opens a line that the writer created.

    Opening the line unlinks its file, so the memory is freed when both processes have ended.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._line = Ring(open_segment(folder / name), name)
        (folder / name).unlink(missing_ok=True)
        self._shelf = BlockShelf(folder, name)
        self._tail = self._line.reader[HEAD]
        self._begun: bytearray | None = None  # the pieces received so far
        self._woken = self._closed = self._end_seen = False
        self._wakes = itertools.count(1, 2)
        self._brisk = True  # the last wait was short
        self._num_rings = 0

    @property
    def ended(self) -> bool:
        """Whether the writer has closed the line and everything it sent was received."""
        return bool(self._line.writer[CLOSED]) and self._line.writer[HEAD] == self._tail

    def receive(self, timeout_s: float) -> list[memoryview] | None:
        """Returns the frames of the next message, writable and owned by the receiver; None on timeout or after `wake`.

        Also returns None, immediately but only once, when the writer has closed the line.

        The frames of a large message are views of shared memory, which the writer reuses when the last view of it is
        released: copy what must be kept for long. Raises Refused if the line holds invalid data.
        """
        line, deadline = self._line, 0.0
        while True:
            if self._woken or self._closed:
                self._woken = False
                return None
            if line.writer[HEAD] != self._tail:
                if (frames := self._take()) is not None:
                    return frames
                continue
            if line.writer[CLOSED] and not self._end_seen:
                if line.writer[HEAD] != self._tail:  # sent just before the line was closed
                    continue
                self._end_seen = True
                return None
            now = time.monotonic()
            deadline = deadline or now + timeout_s
            if now >= deadline:
                return None
            self._wait(now, deadline)

    def _wait(self, now: float, deadline: float) -> None:
        """Waits until the ring holds a record, at most until `deadline`; may return early."""
        line, tail, start = self._line, self._tail, now
        head = line.writer
        while now < deadline and now < start + (COMING_S if head[COMING] else SPIN_S if self._brisk else 0.0):
            for _ in range(NUM_LOOKS):
                if head[HEAD] != tail:
                    return
            os.sched_yield()
            now = time.monotonic()
        seen = line.bell.value
        line.reader[SLEEPS] = 1
        fence()
        if head[HEAD] == tail and not self._woken and (self._end_seen or not head[CLOSED]):
            line.bell.wait(seen, deadline - now)
        line.reader[SLEEPS] = 0
        self._brisk = time.monotonic() - start < BRISK_S

    def _take(self) -> list[memoryview] | None:
        """Reads one record from the ring; returns the message that it completes, or None."""
        line, at = self._line, self._tail % RING_BYTES
        kind, nbytes = RECORD.unpack_from(line.records, at)
        waiting = line.writer[HEAD] - self._tail
        size = RING_BYTES - at if kind == SKIP else RECORD.size + padded(nbytes)
        if not 0 <= nbytes <= RING_BYTES or not size <= waiting <= RING_BYTES or at + size > RING_BYTES:
            raise Refused(
                f"line {self.name} was refused: a record of {nbytes} bytes at {at}, with {waiting} bytes unread in a "
                f"ring of {RING_BYTES}."
            )
        payload = line.records[at + RECORD.size : at + RECORD.size + nbytes]
        body: memoryview | None = None
        if kind == MESSAGE:
            body = memoryview(bytearray(payload))  # a copy: the ring reuses these bytes
        elif kind == BLOCK and nbytes == RECORD.size:
            body = self._shelf.lease(*RECORD.unpack(payload))
        elif kind == BEGIN:
            self._begun = bytearray(payload)
        elif kind in (MIDDLE, END) and self._begun is not None:
            self._begun += payload
            if kind == END:
                body, self._begun = memoryview(self._begun), None
        elif kind != SKIP:
            raise Refused(f"line {self.name} was refused: a record of kind {kind} and {nbytes} bytes at {at}.")
        if at == 0:  # the ring has wrapped around
            self._shelf.sweep()
        self._release(size)
        return None if body is None else frames_of(body, self.name)

    def _release(self, size: int) -> None:
        """Frees `size` bytes of the ring, and wakes a waiting writer once half of the ring is empty."""
        line = self._line
        self._tail += size
        line.reader[HEAD] = self._tail
        if line.writer[HEAD] - self._tail <= RING_BYTES // 2:
            fence()
            if line.writer[SLEEPS]:
                self._ring()

    def _ring(self) -> None:
        self._num_rings += 2
        self._line.room.value = self._num_rings & 0x7FFFFFFF
        self._line.room.wake()

    def wake(self) -> None:
        """Makes a `receive` that waits in another thread return None; if none waits, the next `receive` does."""
        self._woken = True
        self._line.bell.value = next(self._wakes) & 0x7FFFFFFF
        self._line.bell.wake()

    def close(self) -> None:
        """Closes this end: from now on the writer's `send` returns False. Received views stay valid."""
        if self._closed:
            return
        self._closed = True
        self.wake()
        self._line.reader[CLOSED] = 1
        self._ring()
        self._shelf.close()
