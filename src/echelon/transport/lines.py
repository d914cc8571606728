"""Lines: messages from one process to one other of the same host, in order, through shared memory.

A message is a list of buffers, as `codec.encode` makes them, laid end to end (`ring.py`). A small one goes into a ring;
a large one is copied once into a block (`blocks.py`), where the reader uses it in place, and the ring carries the
block's number; with no block free it goes through the ring in pieces.

Words, each with one writer: the writer's `head` counts the bytes it put into the ring, the reader's `tail` those it
took out. A record is whole before `head` passes it, and a message before its last record does, so a writer that dies
leaves only whole messages. `coming` says that a large one is being copied. `bell` and `room` are what reader and writer
sleep on; nothing is counted in them, so that a process may also ring its own sleepers: even values are the other
side's, odd ones its own.

Who waits: the reader for a message, woken by `send`, by `wake`, by the writer's `close`. A writer for room in the
ring (never for a block, so there is nobody to wait for but the reader's next `receive`), woken when half of the ring
is empty, and by `close` on either side. Each looks again after it has said that it sleeps, with a fence between, and
the other looks for sleepers after it has moved its word, so no wake-up is lost. The reader spins before it sleeps, and
is woken before a large message is copied, not after: so it is awake when that is there.
If the reader dies, `send` finds the ring full and says so after its timeout; if the writer dies, `receive` returns what
was sent whole and then waits out its timeout: whoever learns of a death calls `wake`.
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
    lay_body,
    padded,
)
from echelon.transport.segments import create_segment, open_segment

SPIN_S = 60e-6  # a reader looks for so long before it sleeps, if its last wait was over within BRISK_S: a sleep costs
BRISK_S = 120e-6  # each side some 30 us more, but who waits long is to burn no core
COMING_S = 1e-3  # it looks so long for a message of which it knows that it is being written
NUM_LOOKS = 8  # before the core is offered to somebody else


class LineWriter:
    """The end of a line that sends, from any thread; makes the line, which the reader then opens by name."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path, self.name = folder / name, name
        self._line = Ring(create_segment(self._path, LINE_BYTES), name)
        self._pool = BlockPool(folder, name)
        self._lock = threading.Lock()
        self._head = self._num_rings = 0
        self._closed = False

    @property
    def block_bytes(self) -> int:
        """The shared memory that large messages have taken so far."""
        return self._pool.nbytes

    @property
    def abandoned(self) -> bool:
        """Whether the reader closed its end."""
        return bool(self._line.reader[CLOSED])

    def send(self, frames: Sequence[Buffer], timeout_s: float, go_on: Callable[[], bool] = lambda: False) -> bool:
        """Puts one message on the line; the buffers may change afterwards.

        False if it is not sent: the reader took nothing in for `timeout_s`, or closed its end. Where a message goes in
        pieces and is half-way then, `go_on` is asked whether to wait on: to begin it anew may take for ever.
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
                lay_body(self._line.records, at + RECORD.size, frames, lengths)
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
            lay_body(memoryview(body), 0, frames, lengths)
            return self._send_parts(memoryview(body), timeout_s, go_on)
        self._announce()
        lay_body(block.room.data, 0, frames, lengths)
        RECORD.pack_into(self._line.records, at + RECORD.size, block.number, nbytes)
        block.state = TAKEN
        self._publish(at, BLOCK, RECORD.size)
        return True

    def _send_parts(self, body: memoryview, timeout_s: float, go_on: Callable[[], bool]) -> bool:
        """Sends `body` through the ring; the reader drops the beginning of one that stopped half-way."""
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
        """Where in the ring a record of `nbytes` goes, once there is room for it; -1 if none came."""
        line, size = self._line, RECORD.size + padded(nbytes)
        at = self._head % RING_BYTES
        skipped = RING_BYTES - at if at + size > RING_BYTES else 0
        full = self._head + skipped + size - RING_BYTES  # there is room once `tail` is here
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
        """Shows the record at `at` to the reader, which may sleep."""
        line = self._line
        RECORD.pack_into(line.records, at, kind, nbytes)
        self._head += RECORD.size + padded(nbytes)
        line.writer[HEAD] = self._head
        line.writer[COMING] = 0
        fence()
        if line.reader[SLEEPS]:
            self._ring()
        if at == 0:  # once round
            self._pool.trim()

    def _announce(self) -> None:
        """Wakes the reader already while a large message is copied, which takes longer than to wake up."""
        self._line.writer[COMING] = 1
        fence()
        if self._line.reader[SLEEPS]:
            self._ring()

    def _ring(self) -> None:
        self._num_rings += 2
        self._line.bell.value = self._num_rings & 0x7FFFFFFF
        self._line.bell.wake()

    def close(self, discard: bool = False) -> None:
        """Ends the line; the reader still gets what was sent, unless `discard` says that nobody will open it.

        A `send` that waits in another thread returns False.
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
    """The end of a line that receives, in one thread at a time; opens a line that its writer made.

    The line's file goes when it is opened: only the two processes keep the memory, so it goes with them.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._line = Ring(open_segment(folder / name), name)
        (folder / name).unlink(missing_ok=True)
        self._shelf = BlockShelf(folder, name)
        self._tail = self._line.reader[HEAD]
        self._begun: bytearray | None = None  # the pieces of a body so far
        self._woken = self._closed = self._end_seen = False
        self._wakes = itertools.count(1, 2)
        self._brisk = True  # the last wait was short
        self._num_rings = 0

    @property
    def ended(self) -> bool:
        """Whether the writer closed the line and everything it sent was received."""
        return bool(self._line.writer[CLOSED]) and self._line.writer[HEAD] == self._tail

    def receive(self, timeout_s: float) -> list[memoryview] | None:
        """The next message: its frames, writable and the receiver's own; None if none came, or `wake` was called.

        None also, once and at once, when the writer has closed the line.

        Views of a large message lie in shared memory that the writer reuses when the last of them, and of what was
        made of them, is gone: keep a copy of what is to stay. Raises Refused on what no writer of ours writes.
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
                if line.writer[HEAD] != self._tail:  # sent just before
                    continue
                self._end_seen = True
                return None
            now = time.monotonic()
            deadline = deadline or now + timeout_s
            if now >= deadline:
                return None
            self._wait(now, deadline)

    def _wait(self, now: float, deadline: float) -> None:
        """Waits until the ring has something, or `deadline`; may come back for nothing."""
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
        """Takes one record out of the ring: the message it completes, if it completes one."""
        line, at = self._line, self._tail % RING_BYTES
        kind, nbytes = RECORD.unpack_from(line.records, at)
        waiting = line.writer[HEAD] - self._tail
        size = RING_BYTES - at if kind == SKIP else RECORD.size + padded(nbytes)
        if not 0 <= nbytes <= RING_BYTES or not size <= waiting <= RING_BYTES or at + size > RING_BYTES:
            raise Refused(
                f"line {self.name} was refused: a record of {nbytes} bytes at {at}, where {waiting} bytes wait in a "
                f"ring of {RING_BYTES}."
            )
        payload = line.records[at + RECORD.size : at + RECORD.size + nbytes]
        body: memoryview | None = None
        if kind == MESSAGE:
            body = memoryview(bytearray(payload))  # of the receiver's own: the ring goes round
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
        if at == 0:  # once round
            self._shelf.sweep()
        self._release(size)
        return None if body is None else frames_of(body, self.name)

    def _release(self, size: int) -> None:
        """Gives the ring's bytes back, and wakes a writer that waits for room once there is plenty."""
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
        """Makes a `receive` that waits in another thread return None; if none waits, the next one does."""
        self._woken = True
        self._line.bell.value = next(self._wakes) & 0x7FFFFFFF
        self._line.bell.wake()

    def close(self) -> None:
        """Ends the line on this side: the writer's sends are False from now on; received views stay valid."""
        if self._closed:
            return
        self._closed = True
        self.wake()
        self._line.reader[CLOSED] = 1
        self._ring()
        self._shelf.close()
