"""The client's side of the channel: requests to one server, repeated until they are answered.

A client belongs to one thread and works only inside its methods: `ask` sends; `poll` and `wait` receive replies and
repeat requests that are due. Who waits: the caller, for replies. What bounds it: the caller's unanswered requests. All
requests are repeated when the connection was re-established, since they may have been lost with the old one, and when
the server has been silent for a while. A single request is repeated when others are answered but it is not. The client
itself never gives up on a silent server: the caller decides, by `silent_s`. If the server refuses a request, or refuses
the handshake because of the secret, the client raises Refused.

Imports nothing heavier than pyzmq.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from echelon.errors import Refused, escaped
from echelon.transport.channel import HEADER, MAGIC, MAX_REASON_BYTES, NOTHING, Kind, Own, Part, Service
from echelon.transport.secret import REMEDY, numeric, secret_for
from echelon.transport.sockets import (
    LINGER_MS,
    QUEUED_MESSAGES,
    connect,
    is_handshake_refused,
    receive_frames,
    send_frames,
    why_silent,
)

FIRST_REPEAT_S, MAX_REPEAT_S = 0.25, 1.0  # first and longest delay before requests to a silent server are repeated
OVERDUE_S = 2.0  # delay before one request is repeated while others are answered; doubled each time
FULL_S = 0.05  # delay before a request that did not fit into the queue is sent again
LOOK_S = 0.02  # how often, at most, the client looks whether it was connected again
NUM_POSTS = 16  # posts kept; the oldest are dropped

Make = Callable[[], Sequence[Part]]  # makes the frames of a request at each send; the first has space for the header


class PendingRequest:
    """A request in flight, and its reply."""

    __slots__ = ("answer", "make", "number", "overdue_at", "overdue_s", "own", "service")

    def __init__(self, service: Service, make: Make, number: int, own: Own, now: float, overdue_s: float) -> None:
        self.service, self.make, self.number, self.own = service, make, number, own
        self.answer: list[memoryview] | None = None  # the first frame starts with the header; its words replace `own`
        self.overdue_s = overdue_s
        self.overdue_at = now + overdue_s  # then it is repeated, even if others are answered


class Client:
    """Sends requests to the services of the server at `address`."""

    def __init__(
        self,
        what: str,
        address: str,
        max_bytes: int,
        *,
        queued: int = QUEUED_MESSAGES,
        name: bytes = b"",
        repeat_s: tuple[float, float] = (FIRST_REPEAT_S, MAX_REPEAT_S),
        longest_s: float = 0.0,
    ) -> None:
        """Connects in the background to `what`; replies have frames of at most `max_bytes`.

        The server recognizes a client by its `name` after a reconnect or a restart of either side; without `name`,
        libzmq assigns one. Requests are repeated `longest_s` later than those with short replies: the time that the
        longest reply may take on the link, since a repeated request is answered again.
        """
        self.what, self.address = what, numeric(address)
        self.has_heard = False
        self.num_tries = 0  # since the last message from the server
        self._secret, self._overdue_s = secret_for(address), OVERDUE_S + longest_s
        self._first_s, self._max_s = (one_s + longest_s for one_s in repeat_s)
        self.posts = collections.deque[list[memoryview]](maxlen=NUM_POSTS)  # posts of the server, the oldest first
        self._requests: dict[tuple[int, int], PendingRequest] = {}  # in flight, the oldest first
        self._last_number = 0
        self._silent_since = math.inf  # time of the first repetition since the last message from the server
        self._repeat_s, self.repeat_at = self._first_s, math.inf
        max_bytes = max(max_bytes, HEADER.size + MAX_REASON_BYTES)
        self._receive_ms = -1
        self.socket = connect(self.address, self._secret, max_bytes, queued, name)
        self.descriptor = int(self.socket.getsockopt(zmq.FD))
        self._monitor: Any = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._is_cut, self._look_at = False, 0.0

    # Requests.

    def ask(self, service: Service, make: Make, *, number: int = 0, own: Own = NOTHING) -> PendingRequest:
        """Sends a request; buffers that `make` returns again must not change until the reply has arrived.

        `number` is that of a record, or one chosen by the service; repetitions have the same number. 0: automatic.
        """
        if not number:
            self._last_number += 1
            number = self._last_number
        now = time.monotonic()
        request = self._requests[service.digest, number] = PendingRequest(
            service, make, number, own, now, self._overdue_s
        )
        if len(self._requests) == 1:
            self._repeat_s, self.repeat_at = self._first_s, now + self._first_s
        self._send(request, copy=False)
        return request

    def post(self, service: Service, parts: Sequence[Part], *, own: Own = NOTHING) -> bool:
        """Sends a message without a reply, which may be lost; returns False if the queue is full."""
        return self._transmit(Kind.POST, service, 0, own, parts, copy=True)

    def forget(self, request: PendingRequest) -> None:
        """Stops waiting for the reply to `request`."""
        self._requests.pop((request.service.digest, request.number), None)

    def _send(self, request: PendingRequest, copy: bool) -> None:
        if not self._transmit(Kind.ASK, request.service, request.number, request.own, request.make(), copy):
            request.overdue_at = time.monotonic() + FULL_S

    def _transmit(self, kind: int, service: Service, number: int, own: Own, parts: Sequence[Part], copy: bool) -> bool:
        HEADER.pack_into(parts[0], 0, MAGIC, kind, service.digest, service.layout, number, *own)
        try:
            send_frames(self.socket, parts, copy)
        except zmq.Again:  # the queue is full: the server does not receive
            return False
        return True

    # Replies.

    def wait(self, request: PendingRequest, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for the reply to `request`; returns whether it has arrived."""
        if request.answer is not None:
            return True
        now = time.monotonic()
        deadline = now + timeout_s
        while True:
            while self._receive(min(deadline, self.repeat_at) - now):
                if request.answer is not None:
                    return True
                now = time.monotonic()
            now = time.monotonic()
            self._repeat_due(now)
            if now >= deadline:
                return False

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Receives messages for up to `timeout_s` and repeats due requests; returns whether any message arrived."""
        heard = self._receive(min(timeout_s, max(0.0, self.repeat_at - time.monotonic())) if timeout_s else 0.0)
        came = heard
        while came:
            came = self._receive(0.0)
        self._repeat_due(time.monotonic())
        return heard

    def has_message(self) -> bool:
        """Returns whether a message is waiting; check it before sleeping on the descriptor."""
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _receive(self, timeout_s: float) -> bool:
        """Receives one message within `timeout_s`; returns whether one arrived."""
        timeout_ms = max(0, math.ceil(timeout_s * 1000))
        if timeout_ms != self._receive_ms:
            self.socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
            self._receive_ms = timeout_ms
        try:
            frames = receive_frames(self.socket)
        except zmq.Again:
            return False
        self._take(frames)
        return True

    def _take(self, frames: list[memoryview]) -> None:
        """Processes one message of the server; replies to forgotten requests are ignored."""
        if len(frames[0]) < HEADER.size:
            raise self._no_server(frames)
        magic, kind, digest, _, number, one, two, three = HEADER.unpack_from(frames[0])
        if magic != MAGIC or kind not in (Kind.ANSWER, Kind.REFUSED, Kind.POST):
            raise self._no_server(frames)
        self.has_heard, self.num_tries = True, 0
        if kind == Kind.REFUSED:
            reason = escaped(bytes(frames[0][HEADER.size :]).decode(errors="replace")).rstrip(".")
            raise Refused(f"{self.what} at {self.address} refused this client: {reason}.")
        if kind == Kind.POST:
            self.posts.append(frames)
            return
        request = self._requests.pop((digest, number), None)
        self._silent_since, self._repeat_s = math.inf, self._first_s
        self.repeat_at = time.monotonic() + self._first_s if self._requests else math.inf
        if request is not None:
            request.answer, request.own = frames, (one, two, three)

    def _no_server(self, frames: list[memoryview]) -> Refused:
        return Refused(f"{self.address} sent {len(frames[0])} bytes that are not a reply: it is not {self.what}.")

    # Repetition.

    def _repeat_due(self, now: float) -> None:
        if now >= self._look_at and self._has_reconnected(now) and self._requests:
            self._repeat_s, self.repeat_at = self._first_s, now + self._first_s
            self._send_all(now)
        elif now >= self.repeat_at:
            self._repeat(now)
        for request in self._requests.values():
            if now >= request.overdue_at:
                request.overdue_s *= 2.0
                request.overdue_at = now + request.overdue_s
                self._send(request, copy=True)

    def _has_reconnected(self, now: float) -> bool:
        """Returns whether the connection has been re-established since the last call."""
        self._look_at, has_reconnected = now + LOOK_S, False
        with suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
                has_reconnected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED and (self._is_cut or has_reconnected)
                self._is_cut = event == zmq.EVENT_DISCONNECTED
        return has_reconnected

    def _repeat(self, now: float) -> None:
        """Repeats all requests: the connection or the server may be a new one."""
        self.num_tries += 1
        self._silent_since = min(self._silent_since, now)  # not earlier: this process may have been suspended
        if not self.has_heard and self.num_tries % 4 == 1 and is_handshake_refused(self.address, self._secret):
            raise Refused(f"{self.what} at {self.address} refuses the handshake. {REMEDY}")
        self._repeat_s = min(2 * self._repeat_s, self._max_s)
        self.repeat_at = now + self._repeat_s
        self._send_all(now)

    def _send_all(self, now: float) -> None:
        for request in self._requests.values():
            request.overdue_at = now + request.overdue_s
            self._send(request, copy=True)  # copied: if the first one is answered, its arrays may change

    @property
    def silent_s(self) -> float:
        """How long the server has been silent, counted from the first repetition."""
        return max(0.0, time.monotonic() - self._silent_since)

    def why_silent(self) -> str:
        """Returns the probable reason why the server does not reply, and the remedy."""
        return why_silent(self.address)

    def close(self) -> None:
        """Closes the connection, after waiting up to `LINGER_MS` for the last posts to be sent."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
            self.socket.close(linger=LINGER_MS)
