"""The client's side of the channel: questions to one server, repeated until they are answered.

A client belongs to one thread and works only inside its own methods: `ask` sends, `poll` and `wait` take in what came
and repeat what is due. Who waits: the caller, for answers. What bounds it: what it has asked for and not been answered.
Questions are repeated when nothing at all was heard for a while, and one by one when others are answered and they are
not: they may have been lost with a connection. A server that is gone is waited for, for as long as the caller likes:
`silent_s` says how long it has said nothing. One that refuses raises Refused, and so does one that does not let this
client in at all, by its secret.

Needs nothing heavier than pyzmq.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Sequence

import zmq

from echelon.errors import Refused
from echelon.transport.channel import HEADER, MAGIC, MAX_REASON_BYTES, NOTHING, Kind, Own, Part, Service
from echelon.transport.secret import SECRET_VARIABLE, check_secret, numeric
from echelon.transport.sockets import (
    LINGER_MS,
    QUEUED_MESSAGES,
    connect,
    is_turned_away,
    receive_frames,
    send_frames,
    why_silent,
)

FIRST_REPEAT_S, MAX_REPEAT_S = 0.25, 1.0  # when what nobody answers is sent again
OVERDUE_S = 2.0  # when one question is sent again while others are answered; then after twice as long
FULL_S = 0.05  # when what the queue had no room for is sent again
NUM_POSTS = 16  # that are kept; the oldest are forgotten

Make = Callable[[], Sequence[Part]]  # the frames of a question, whenever it is sent; the first has room for a header


class PendingRequest:
    """A question under way, and its answer."""

    __slots__ = ("answer", "make", "number", "overdue_at", "overdue_s", "own", "service")

    def __init__(self, service: Service, make: Make, number: int, own: Own, now: float) -> None:
        self.service, self.make, self.number, self.own = service, make, number, own
        self.answer: list[memoryview] | None = None  # the first frame opens with the header, whose words are `own` then
        self.overdue_s = OVERDUE_S
        self.overdue_at = now + OVERDUE_S  # then it is sent again, though others are answered


class Client:
    """Asks the services of the server at `address`."""

    def __init__(
        self,
        what: str,
        address: str,
        secret: str | None,
        max_bytes: int,
        *,
        queued: int = QUEUED_MESSAGES,
        name: bytes = b"",
        repeat_s: tuple[float, float] = (FIRST_REPEAT_S, MAX_REPEAT_S),
    ) -> None:
        """Connects in the background to `what`; answers have frames of at most `max_bytes`.

        Under its `name` the server finds it again, whichever of them was lost meanwhile; without one it gets one.
        """
        check_secret(address, secret)
        self.what, self.address = what, numeric(address)
        self.has_heard = False
        self.num_tries = 0  # since the server was last heard
        self._secret, self._first_s, self._max_s = secret, *repeat_s
        self.posts = collections.deque[list[memoryview]](maxlen=NUM_POSTS)  # what came unasked, the oldest first
        self._requests: dict[tuple[int, int], PendingRequest] = {}  # under way, the oldest first
        self._last_number = 0
        self._silent_since = math.inf  # when something was first asked again, since the server was last heard
        self._repeat_s, self.repeat_at = self._first_s, math.inf
        max_bytes = max(max_bytes, HEADER.size + MAX_REASON_BYTES)
        self._receive_ms = -1
        self.socket = connect(self.address, secret, max_bytes, queued, name)
        self.descriptor = int(self.socket.getsockopt(zmq.FD))

    # What is asked.

    def ask(self, service: Service, make: Make, *, number: int = 0, own: Own = NOTHING) -> PendingRequest:
        """Sends a question; what `make` returns must rest until it is answered, unless it is made anew each time.

        `number` is that of a record, or one of the service's own, the same however often it is sent; 0: any.
        """
        if not number:
            self._last_number += 1
            number = self._last_number
        now = time.monotonic()
        request = self._requests[service.digest, number] = PendingRequest(service, make, number, own, now)
        if len(self._requests) == 1:
            self._repeat_s, self.repeat_at = self._first_s, now + self._first_s
        self._send(request, copy=False)
        return request

    def post(self, service: Service, parts: Sequence[Part], *, own: Own = NOTHING) -> bool:
        """Sends what has no answer; it may be lost. False where the queue has no room for it."""
        return self._transmit(Kind.POST, service, 0, own, parts, copy=True)

    def forget(self, request: PendingRequest) -> None:
        """Waits no longer for an answer."""
        self._requests.pop((request.service.digest, request.number), None)

    def _send(self, request: PendingRequest, copy: bool) -> None:
        if not self._transmit(Kind.ASK, request.service, request.number, request.own, request.make(), copy):
            request.overdue_at = time.monotonic() + FULL_S

    def _transmit(self, kind: int, service: Service, number: int, own: Own, parts: Sequence[Part], copy: bool) -> bool:
        HEADER.pack_into(parts[0], 0, MAGIC, kind, service.digest, service.layout, number, *own)
        try:
            send_frames(self.socket, parts, copy)
        except zmq.Again:  # the queue is full of what was sent before: nobody takes anything in
            return False
        return True

    # What comes.

    def wait(self, request: PendingRequest, timeout_s: float) -> bool:
        """Sleeps until `request` is answered, at most `timeout_s`; whether it is."""
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
        """Takes in what comes within `timeout_s`, and asks again what was not answered; whether anything came."""
        heard = self._receive(min(timeout_s, max(0.0, self.repeat_at - time.monotonic())) if timeout_s else 0.0)
        came = heard
        while came:
            came = self._receive(0.0)
        self._repeat_due(time.monotonic())
        return heard

    def has_mail(self) -> bool:
        """Whether something is there to take in; to be looked at before sleeping on the descriptor."""
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _receive(self, timeout_s: float) -> bool:
        """Takes in one message if one comes within `timeout_s`."""
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
        """One message of the server; answers to what is no longer asked are passed over."""
        if len(frames[0]) < HEADER.size:
            raise self._no_server(frames)
        magic, kind, digest, _, number, one, two, three = HEADER.unpack_from(frames[0])
        if magic != MAGIC or kind not in (Kind.ANSWER, Kind.REFUSED, Kind.POST):
            raise self._no_server(frames)
        self.has_heard, self.num_tries = True, 0
        if kind == Kind.REFUSED:
            reason = bytes(frames[0][HEADER.size :]).decode(errors="replace").rstrip(".")
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
        return Refused(f"{self.address} sent {len(frames[0])} bytes that are no answer: {self.what} is not there.")

    # What is not answered.

    def _repeat_due(self, now: float) -> None:
        if now >= self.repeat_at:
            self._repeat(now)
        for request in self._requests.values():
            if now >= request.overdue_at:
                request.overdue_s *= 2.0
                request.overdue_at = now + request.overdue_s
                self._send(request, copy=True)

    def _repeat(self, now: float) -> None:
        """Asks again: the connection, or the server, may be a new one."""
        self.num_tries += 1
        self._silent_since = min(self._silent_since, now)  # not before: this process may have been stopped
        if not self.has_heard and self.num_tries % 4 == 1 and is_turned_away(self.address, self._secret):
            raise Refused(
                f"{self.what} at {self.address} does not let us in. Set {SECRET_VARIABLE} to the same value on both "
                "sides, or on neither."
            )
        self._repeat_s = min(2 * self._repeat_s, self._max_s)
        self.repeat_at = now + self._repeat_s
        for request in self._requests.values():
            request.overdue_at = now + request.overdue_s
            self._send(request, copy=True)  # should the first get through after all, its arrays may change meanwhile

    @property
    def silent_s(self) -> float:
        """How long nothing was heard though it was asked again."""
        return max(0.0, time.monotonic() - self._silent_since)

    def why_silent(self) -> str:
        """What keeps us from the server, as far as can be seen from here, and what to do."""
        return why_silent(self.address)

    def close(self) -> None:
        """Hangs up, waiting a little for what was posted last."""
        self.socket.close(linger=LINGER_MS)
