"""Shared memory between actors and the learner: doorbells, the slot ring and the weights board.

Every shared word has one writer at a time. There are no locks, so a dead process cannot hold one. Stores become visible
in program order, as on x86-64; `store_order` refuses other processors.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from echelon.disk import open_own
from echelon.errors import Refused, TransportError
from echelon.layout import ALIGNMENT
from echelon.transport.segments import join_segment, reserve

Array = np.ndarray[Any, Any]
WORDS_PER_LINE = ALIGNMENT // 8


class Doorbell:
    """A named FIFO on which one process sleeps and which any process can ring.

    `ring` never blocks: a full pipe means that a wake-up is already pending. If the sleeping process dies, rings are
    kept for its successor; the death of a ringing process affects no other.
    """

    def __init__(self, path: Path) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        try:
            self.descriptor = open_own(path, os.O_RDWR, kind=stat.S_IFIFO)
        except PermissionError as error:
            raise Refused(
                f"doorbell {path} is refused: {error.strerror}. Another user may have put it there."
            ) from error

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self.descriptor, b"\0")

    def clear(self) -> None:
        """Discards past rings. Call it before you check what they announced, so that no ring is missed."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.descriptor, 65536)) == 65536:
                pass

    def wait(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self.descriptor], [], [], timeout_s)
        return bool(ready)

    def close(self) -> None:
        os.close(self.descriptor)


class Doorbells:
    """One doorbell per stream, opened on first use: an actor needs only its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._opened: dict[int, Doorbell] = {}

    def __getitem__(self, stream: int) -> Doorbell:
        if (bell := self._opened.get(stream)) is None:
            bell = self._opened[stream] = Doorbell(self._folder / f"{self._name}-{stream}")
        return bell

    def close(self) -> None:
        for bell in self._opened.values():
            bell.close()
        self._opened.clear()


class SlotLayout(Protocol):
    """The layout of a slot in memory."""

    @property
    def nbytes(self) -> int: ...

    def views(self, memory: Array) -> dict[str, Array]: ...


class SlotRing:
    """A fixed ring of slots in shared memory, one trajectory or gradient each: many actors write, one learner reads.

    A *stream* holds the trajectories of one actor. It owns `num_slots` slots, which only its actor writes (or the
    carrier, if the actor is on another host), in
    ring order. Its words, one cache line each: `head` (trajectories committed, written by the actor), `released`
    (trajectories read, written by the learner) and `granted` (the total number of trajectories the actor may start,
    written by the learner: this bounds the lag and gives backpressure). An actor that has reached
    its grant waits on its `free` doorbell, rung by `grant`. The learner waits on `ready`, rung by `commit`.

    If an actor dies while it writes a slot, its successor starts over at `head` once the dead process is reaped: no
    learner has read that slot. If the learner dies, the words remain, and its successor continues at `released`.
    """

    def __init__(
        self, folder: Path, schema: SlotLayout, num_streams: int, num_slots: int, *, is_sparse: bool = False
    ) -> None:
        """With `is_sparse`, the ring has no memory for slots but those of streams that are reserved (`reserve`)."""
        self.schema, self.num_streams, self.num_slots = schema, num_streams, num_slots
        self._path = path = folder / "trajectories"
        nbytes = self.size(schema, num_streams, num_slots)
        memory = join_segment(path, nbytes, self._words_size(num_streams) if is_sparse else None)
        if memory.nbytes != nbytes:
            raise TransportError(f"segment {path} has {memory.nbytes} bytes where {nbytes} are expected")
        words = memory[: self._words_size(num_streams)].view(np.int64).reshape(3, num_streams, WORDS_PER_LINE)
        self.head, self.released, self.granted = words[0, :, 0], words[1, :, 0], words[2, :, 0]
        self._slots = memory[self._words_size(num_streams) :].reshape(num_streams, num_slots, schema.nbytes)
        self._views: dict[int, list[dict[str, Array]]] = {}  # by stream, made on first use: an actor needs only its own
        self.ready = Doorbell(folder / "ready")
        self.free = Doorbells(folder, "free")

    @staticmethod
    def _words_size(num_streams: int) -> int:
        return 3 * num_streams * ALIGNMENT

    @classmethod
    def size(cls, schema: SlotLayout, num_streams: int, num_slots: int) -> int:
        return cls._words_size(num_streams) + num_streams * num_slots * schema.nbytes

    def reserve(self, stream: int) -> None:
        """Allocates the memory of a stream's slots in a sparse ring."""
        nbytes = self.num_slots * self.schema.nbytes
        reserve(self._path, self._words_size(self.num_streams) + stream * nbytes, nbytes)

    def slots(self, stream: int) -> list[dict[str, Array]]:
        """Returns the slots of a stream."""
        if (views := self._views.get(stream)) is None:
            views = self._views[stream] = [self.schema.views(slot) for slot in self._slots[stream]]
        return views

    # The writer's side.

    def may_begin(self, stream: int) -> bool:
        return bool(self.head[stream] < self.granted[stream])

    def writable(self, stream: int) -> dict[str, Array]:
        """Returns the slot that `stream` writes next; call it only if `may_begin`."""
        return self.slots(stream)[int(self.head[stream]) % self.num_slots]

    def commit(self, stream: int) -> None:
        """Makes the written slot visible to the learner."""
        self.head[stream] += 1
        self.ready.ring()

    # The reader's side.

    def num_ready(self, stream: int) -> int:
        return int(self.head[stream] - self.released[stream])

    def readable(self, stream: int, ahead: int = 0) -> dict[str, Array]:
        """Returns the oldest unread slot of `stream`, or the slot `ahead` positions after it."""
        return self.slots(stream)[(int(self.released[stream]) + ahead) % self.num_slots]

    def release(self, stream: int, count: int = 1) -> None:
        self.released[stream] += count

    def grant(self, stream: int, window: int) -> None:
        """Lets `stream` start up to `window` trajectories more than were read."""
        assert window <= self.num_slots, f"window {window} exceeds the {self.num_slots} slots of stream {stream}"
        granted = self.released[stream] + window
        if granted != self.granted[stream]:
            self.granted[stream] = granted
            self.free[stream].ring()

    def close(self) -> None:
        self.ready.close()
        self.free.close()


class WeightsBoard:
    """The newest weights in shared memory: one learner publishes, any process reads, and no process waits.

    The learner moves `reserved` before it overwrites a buffer, and `latest` once the buffer is complete. A reader
    copies a buffer, checks `reserved`, and retries if the buffer was overwritten in the meantime. A learner that dies
    while it publishes leaves `latest` unchanged. Version 0 means that nothing has been published.
    """

    NUM_BUFFERS = 3

    def __init__(self, folder: Path, nbytes: int) -> None:
        path = folder / "weights"
        total = self.size(nbytes)
        memory = join_segment(path, total)
        if memory.nbytes != total:
            raise TransportError(f"segment {path} has {memory.nbytes} bytes where {total} are expected")
        words = memory[: 2 * ALIGNMENT].view(np.int64)
        self._latest, self._reserved = words[:1], words[WORDS_PER_LINE : WORDS_PER_LINE + 1]
        self._buffers = memory[2 * ALIGNMENT :].reshape(self.NUM_BUFFERS, nbytes)

    @classmethod
    def size(cls, nbytes: int) -> int:
        return 2 * ALIGNMENT + cls.NUM_BUFFERS * nbytes

    @property
    def version(self) -> int:
        return int(self._latest[0])

    def publish(self, parts: Sequence[Array], version: int) -> None:
        """Publishes the concatenated bytes of `parts` as version `version` of the weights."""
        assert version > self.version, f"version {version} is not above {self.version}"
        self._reserved[0] = version
        buffer, offset = self._buffers[version % self.NUM_BUFFERS], 0
        for part in parts:
            raw = part.reshape(-1).view(np.uint8)
            buffer[offset : offset + raw.nbytes] = raw
            offset += raw.nbytes
        assert offset == buffer.nbytes, f"{offset} bytes published where the board holds {buffer.nbytes}"
        self._latest[0] = version

    def read(self, out: Array) -> int:
        """Copies the newest weights into `out` and returns their version."""
        while True:
            version = self.version
            np.copyto(out, self._buffers[version % self.NUM_BUFFERS])
            if self._reserved[0] < version + self.NUM_BUFFERS:
                return version
