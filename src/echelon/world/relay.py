"""Relays: a line's other form, for processes that share no memory: messages through the thread that runs the node.

A relay carries lists of buffers in order, like `transport.lines`, from any thread of one process to one reader of
another, or of the same. What bounds it: the writer sends at most `WINDOW_BYTES` or `WINDOW_MESSAGES` ahead of what the
reader took; a writer at its bound sleeps until the reader acknowledges. Nobody else blocks. If the peer dies, whoever
learns of it calls `wake` on the reader and `close` on the writer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from echelon.transport.codec import Buffer

WINDOW_BYTES, WINDOW_MESSAGES = 32 << 20, 1024
ACKNOWLEDGED_BYTES, ACKNOWLEDGED_MESSAGES = WINDOW_BYTES // 4, WINDOW_MESSAGES // 4

Forward = Callable[[list[bytes]], None]
Acknowledge = Callable[[int, int], None]


class Writer(Protocol):
    """The end that sends, of a line or relay."""

    def send(self, frames: Sequence[Buffer], timeout_s: float, go_on: Callable[[], bool] = ...) -> bool: ...

    def close(self) -> None: ...


class Reader(Protocol):
    """The end that receives, of a line or relay."""

    def receive(self, timeout_s: float) -> Sequence[Buffer] | None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class RelayWriter:
    """The end that sends, from any thread."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._changed = threading.Condition()
        self._num_bytes = self._num_messages = 0  # sent and not acknowledged
        self._closed = False

    def send(self, frames: Sequence[Buffer], timeout_s: float, go_on: Callable[[], bool] = lambda: False) -> bool:
        """Sends a copy of `frames`; False if the reader took nothing in for so long, or the relay was closed.

        A message goes whole or not at all, so `go_on` is never asked.
        """
        with self._changed:
            if not self._changed.wait_for(self._has_room, timeout_s) or self._closed:
                return False
            self._num_messages += 1
            self._num_bytes += sum(len(frame) for frame in frames)
        self._forward([bytes(frame) for frame in frames])  # copied once there is room for it
        return True

    def _has_room(self) -> bool:
        return self._closed or (self._num_bytes < WINDOW_BYTES and self._num_messages < WINDOW_MESSAGES)

    def acknowledge(self, num_messages: int, num_bytes: int) -> None:
        """The reader took so much in."""
        with self._changed:
            self._num_messages -= num_messages
            self._num_bytes -= num_bytes
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class RelayReader:
    """The end that receives, in one thread at a time."""

    def __init__(self, acknowledge: Acknowledge) -> None:
        self._acknowledge = acknowledge
        self._changed = threading.Condition()
        self._messages: deque[list[bytes]] = deque()
        self._num_bytes = self._num_messages = 0  # taken and not acknowledged
        self._woken = self._closed = False

    def deliver(self, frames: list[bytes]) -> None:
        """A message came; never blocks."""
        with self._changed:
            self._messages.append(frames)
            self._changed.notify()

    def receive(self, timeout_s: float) -> list[bytes] | None:
        """The next message; None if none came, or `wake` was called."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._woken or self._closed, timeout_s)
            if self._woken or self._closed or not self._messages:
                self._woken = False
                return None
            frames = self._messages.popleft()
        self._num_messages += 1
        self._num_bytes += sum(len(frame) for frame in frames)
        if self._num_messages >= ACKNOWLEDGED_MESSAGES or self._num_bytes >= ACKNOWLEDGED_BYTES:
            self._acknowledge(self._num_messages, self._num_bytes)
            self._num_messages = self._num_bytes = 0
        return frames

    def wake(self) -> None:
        """Makes a `receive` that waits return None; if none waits, the next one does."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._messages.clear()
            self._changed.notify_all()


class Loop:
    """A relay of a process with itself."""

    def __init__(self) -> None:
        self.writer = RelayWriter(lambda frames: self.reader.deliver(frames))
        self.reader = RelayReader(self.writer.acknowledge)
