"""The ends of a connection for calls: socket ends, and the interface that they share with lines.

Lines (lines.py) connect a process to another on the same host or to itself; sockets connect it to a process on any host
over TCP. A writer sends from any thread: messages of at least one frame, whose buffers may be changed afterwards. It
returns False if the peer received nothing for a while, or if it is closed. A reader receives in one thread at a time:
it returns the next message, or None on timeout or after `wake`, which applies to the next receive if none waits. It
raises Refused for data that is not a message.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from echelon.errors import Refused
from echelon.transport.channel import HEADER, Delivery, Kind, Service, digest_of, header
from echelon.transport.curve import Socket, admit
from echelon.transport.lines import LineReader, LineWriter
from echelon.transport.sockets import LINGER_MS, connect, make_socket, receive_frames

QUEUED_CALLS = 64  # messages queued per side and direction of a connection before the sender waits
LOOK_S = 0.001  # how often a waiting sender checks for room

CALLS = Service("calls", Delivery.CALL, digest_of("codec 1"))
OPENING = header(Kind.ASK, CALLS, 0)  # the header of every message

Buffer = bytes | memoryview


class SocketWriter:
    """The writer of a SocketEnd; messages that have arrived can still be received after it is closed."""

    def __init__(self, end: SocketEnd) -> None:
        self._end, self._closed = end, False

    def send(self, frames: Sequence[Buffer], timeout_s: float, go_on: Callable[[], bool] = lambda: False) -> bool:
        """Sends one message, whole or not at all, so `go_on` is never called."""
        return not self._closed and self._end.send(frames, timeout_s)

    def close(self) -> None:
        self._closed = True


class SocketEnd:
    """One end of a connection, and its reader: any thread sends through `writer`, one thread at a time receives.

    The callee listens at a separate address for the one caller with this `name`. What bounds it: `QUEUED_CALLS` on each
    side, and the kernel's buffers; a sender at the bound waits until its peer receives. A broken connection is
    re-established; messages in flight are then lost, and nothing is sent twice. No thread sleeps while it holds the
    lock. A socket's descriptor is edge-triggered: a sender that consumes the edge rings the receiver's bell.
    """

    def __init__(self, socket: Socket, name: bytes = b"") -> None:
        """Wraps a socket; with `name`, the end exchanges messages only with the client of that name."""
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._socket, self._route = socket, [name] if name else []
        self._lock = threading.Lock()
        self._inbox: deque[list[memoryview]] = deque()  # at most QUEUED_CALLS
        self._sleeps = self._woken = self._closed = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        released = weakref.finalize(self, _release, socket, self._bell)  # once no thread can be waiting
        released.atexit = False
        self._poller = select.poll()
        for descriptor in (int(socket.getsockopt(zmq.FD)), self._bell):
            self._poller.register(descriptor, select.POLLIN)

    @classmethod
    def listen(
        cls, context: zmq.Context[Socket], address: str, secret: str | None, max_bytes: int, name: str
    ) -> SocketEnd:
        """Returns the callee's end for the caller `name`; with a `secret`, the context must have a gate."""
        socket = make_socket(context, zmq.ROUTER, max_bytes, QUEUED_CALLS)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # send fails if the caller is not connected or its queue is full
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a caller that reconnects takes over its old connection
        if secret is not None:
            admit(socket, secret)
        try:
            socket.bind(address)
        except BaseException:
            socket.close()
            raise
        return cls(socket, name.encode())

    @classmethod
    def connect(
        cls, context: zmq.Context[Socket], address: str, secret: str | None, max_bytes: int, name: str
    ) -> SocketEnd:
        """Returns the end of the caller `name`."""
        return cls(connect(address, secret, max_bytes, QUEUED_CALLS, name.encode(), context))

    @property
    def writer(self) -> SocketWriter:
        """A new writer of this end, for one user."""
        return SocketWriter(self)

    def send(self, frames: Sequence[Buffer], timeout_s: float) -> bool:
        """Sends like `writer`, until this end is closed."""
        message = [*self._route, OPENING + frames[0], *frames[1:]]
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._closed:
                    return False
                sent = self._transmit(message)
                if self._sleeps and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    os.eventfd_write(self._bell, 1)
            if sent or (left_s := deadline - time.monotonic()) <= 0.0:
                return sent
            time.sleep(min(left_s, LOOK_S))

    def _transmit(self, message: Sequence[Buffer]) -> bool:
        try:
            self._socket.send_multipart(message, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def receive(self, timeout_s: float) -> list[memoryview] | None:
        """Receives like `LineReader.receive`."""
        deadline = 0.0
        while True:
            with self._lock:
                self._sleeps = False
                if self._woken or self._closed:
                    self._woken = False
                    return None
                if self._inbox or self._fetch():
                    return self._inbox.popleft()
                now = time.monotonic()
                deadline = deadline or now + timeout_s
                if now >= deadline:
                    return None
                self._sleeps = True
            self._poller.poll(1000 * (deadline - now))
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)

    def _fetch(self) -> bool:
        """Receives the peer's messages that have arrived; returns whether there are any."""
        with suppress(zmq.Again):
            while len(self._inbox) < QUEUED_CALLS:
                frames = receive_frames(self._socket, zmq.NOBLOCK)
                if self._route and frames.pop(0) != self._route[0]:
                    continue  # not the expected caller
                if not frames or frames[0][: HEADER.size] != OPENING:
                    raise Refused(f"a message at {self.address} was refused: not a call, or from another release.")
                frames[0] = frames[0][HEADER.size :]
                self._inbox.append(frames)
        return bool(self._inbox)

    def wake(self) -> None:
        """Wakes like `LineReader.wake`."""
        self._woken = True
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Ends every wait, and closes the connection once the last messages are sent, or after `LINGER_MS`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._socket.close(linger=LINGER_MS)
        os.eventfd_write(self._bell, 1)


def _release(socket: Socket, bell: int) -> None:
    socket.close(linger=LINGER_MS)
    os.close(bell)


CallWriter = LineWriter | SocketWriter
CallReader = LineReader | SocketEnd
