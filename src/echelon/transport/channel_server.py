"""The server's side of the channel: receives requests from any client and sends replies.

It listens on one ROUTER socket and accepts the clients that its gate admits: those whose CURVE keys are derived from
the same secret (`curve.py`). Its owner calls `take` until nothing is left, and then `sleep`, all in one thread. What
bounds it: a queue per connection, a maximum message size, and one held request per connection and service. If a client
does not receive, its replies are dropped; it repeats its request if it is alive. A client whose message raises any
exception is refused: nothing more is read from its connection, and the owner continues. If the owner dies, clients
reconnect once its successor listens at the same address.

Imports nothing heavier than pyzmq.
"""

from __future__ import annotations

import itertools
import select
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import zmq

from echelon.errors import ConfigError, Refused, escaped
from echelon.transport.channel import (
    HEADER,
    MAGIC,
    MAX_REASON_BYTES,
    NOTHING,
    Delivery,
    Kind,
    Message,
    Own,
    Part,
    Service,
    header,
    print_error,
)
from echelon.transport.connections import LOOK_S
from echelon.transport.curve import Socket, secure_server
from echelon.transport.secret import numeric, secret_for
from echelon.transport.sockets import LINGER_MS, MORE, QUEUED_MESSAGES, make_socket, receive_frames, send_frames

IGNORED_CONNECTIONS = 10_000  # refused connections remembered; the oldest are dropped
GATE_S = 0.01  # how often the gate is served if the owner never sleeps
HOLD_S = 0.2  # a held request is answered after this time even if nothing is newer
NUM_REPORTED, REPORT_EVERY = 5, 100  # of refused messages, the first few are reported, and then every hundredth

Handler = Callable[[Message], None]


class _Offer(NamedTuple):
    """A service of this server."""

    service: Service
    handler: Handler
    has_changed: Callable[[], bool]


class _Held(NamedTuple):
    """A held request for newer state."""

    is_due: Callable[[], bool]
    answer: Callable[[], None]
    until: float


class Server:
    """Receives requests and sends replies. A handler raises Refused for an invalid or hostile message."""

    def __init__(
        self,
        what: str,
        address: str,
        max_bytes: int,
        queued: int = QUEUED_MESSAGES,
        report: Callable[[str], None] = print_error,
    ) -> None:
        """Listens at `address` (tcp://HOST:PORT; port 0: any free port); messages have at most `max_bytes`.

        `what` names the expected clients in messages; `queued` bounds the queue of each connection; `report` receives
        the reasons of refusals.
        """
        secret = secret_for(address)
        self.num_refused_messages = 0
        self._what, self._report = what, report
        self._offers: dict[int, _Offer] = {}
        self._held: dict[tuple[bytes, int], _Held] = {}  # by connection and service, the oldest first
        self._ignored: dict[bytes, None] = {}
        self._context: zmq.Context[Socket] = zmq.Context()
        self._socket = make_socket(self._context, zmq.ROUTER, max_bytes, queued)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # send fails if the peer is not connected
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects replaces its old connection
        self._socket.setsockopt(zmq.BACKLOG, 1024)
        self._gate = secure_server(self._socket, secret, (queued + 1) * max_bytes)
        self._heard, self._gate_at = self._gate.connections.heard, 0.0
        self._poller = select.epoll()
        try:
            self._socket.bind(numeric(address))
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot listen for {what} at {address}: {error}. Choose another address, or port 0."
            ) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._descriptors = [int(self._socket.getsockopt(zmq.FD)), *self._gate.descriptors]
        self._watch(())

    @property
    def descriptors(self) -> list[int]:
        """Readable when a message may have arrived: then call `take` until nothing is left."""
        return self._descriptors

    @property
    def is_open(self) -> bool:
        return not self._socket.closed

    def serve(self, service: Service, handler: Handler, has_changed: Callable[[], bool] | None = None) -> None:
        """Registers `handler` for the messages of `service`; it calls `answer`, now or later, or `hold`.

        `has_changed` returns whether the state may have changed since its last call: only then are held requests looked
        at. Without it, each `take` looks at all of them.
        """
        assert service.delivery is not Delivery.CALL, "clients repeat requests, but calls run at most once"
        always = service.delivery is Delivery.STATE
        self._offers[service.digest] = _Offer(service, handler, has_changed or (lambda: always))

    @property
    def num_refused(self) -> int:
        """The number of messages and handshakes that were refused."""
        return self.num_refused_messages + self.num_refused_handshakes

    @property
    def num_refused_handshakes(self) -> int:
        return self._gate.num_refused

    # Receiving.

    def take(self, most: int) -> int:
        """Handles up to `most` messages that have arrived; returns how many.

        Call `sleep` only if there were fewer than `most`: it wakes only for later messages.
        """
        self._look_at_gate()
        num = 0
        while num < most and (message := self._receive()) is not None:
            self._deal(*message)
            num += 1
        if self._held:
            num += self._release()
        return num

    def _receive(self) -> tuple[bytes, list[memoryview]] | None:
        try:
            while True:
                connection = self._socket.recv(zmq.NOBLOCK)
                frames = receive_frames(self._socket, zmq.NOBLOCK)
                part: Any = frames[0].obj
                self._heard.add(part.get(zmq.SRCFD))
                if connection not in self._ignored:
                    return connection, frames
        except zmq.Again:
            return None

    def _deal(self, connection: bytes, frames: list[memoryview]) -> None:
        """Handles one message, from any client."""
        if len(frames[0]) < HEADER.size:
            self.refuse(connection, "its message has no header", is_client=False)
            return
        magic, kind, digest, layout, number, one, two, three = HEADER.unpack_from(frames[0])
        if magic != MAGIC or kind not in (Kind.ASK, Kind.POST):
            self.refuse(connection, "its message is not a request", is_client=False)
            return
        offered = self._offers.get(digest)
        if offered is None:
            self.refuse(connection, "this server does not offer that service: it is another server's address")
            return
        known, handler, _ = offered
        if layout != known.layout:
            what = f"it was made for another layout of {known.name}; give both sides the same configuration"
            self.refuse(connection, what)
            return
        try:
            handler(Message(connection, known, kind == Kind.POST, number, (one, two, three), frames))
        except Exception as error:
            self._fail(connection, error)

    def _fail(self, connection: bytes, error: Exception) -> None:
        """Refuses the client whose message raised `error`, whatever that is: no message may end the owner."""
        if isinstance(error, Refused):
            self.refuse(connection, str(error))
            return
        if self.num_refused_messages < NUM_REPORTED:
            print_error("".join(traceback.format_exception(error)))
        self.refuse(connection, f"its message could not be handled: {type(error).__name__}: {error}")

    def hold(self, message: Message, is_due: Callable[[], bool], answer: Callable[[], None]) -> None:
        """Calls `answer` as soon as `take` finds `is_due()` True, or after `HOLD_S`."""
        assert message.service.delivery is Delivery.STATE
        key = message.connection, message.service.digest
        self._held.pop(key, None)  # the oldest come first
        self._held[key] = _Held(is_due, answer, time.monotonic() + HOLD_S)

    def _release(self) -> int:
        """Answers the held requests that are due."""
        now = time.monotonic()
        changed = {digest for digest, offer in self._offers.items() if offer.has_changed()}
        num = 0
        for key, held in list(self._held.items()) if changed else self._expired(now):
            try:
                if now >= held.until or (key[1] in changed and held.is_due()):
                    del self._held[key]
                    num += 1
                    held.answer()
            except Exception as error:
                self._held.pop(key, None)
                self._fail(key[0], error)
        return num

    def _expired(self, now: float) -> list[tuple[tuple[bytes, int], _Held]]:
        return list(itertools.takewhile(lambda item: now >= item[1].until, self._held.items()))

    @property
    def is_holding(self) -> bool:
        """Whether a request for newer state is held: the owner must call `take` when there is some."""
        return bool(self._held)

    def sleep(self, timeout_s: float, descriptors: Sequence[int] = ()) -> list[int]:
        """Sleeps up to `timeout_s` until a message arrives; returns those of `descriptors` that are readable."""
        timeout_s = min(timeout_s, LOOK_S)
        if self._held:
            until = next(iter(self._held.values())).until
            timeout_s = min(timeout_s, max(0.0, until - time.monotonic()))
        if descriptors != self._watched:
            self._watch(descriptors)
        ready = [descriptor for descriptor, _ in self._poller.poll(timeout_s)]
        if not set(self._gate.descriptors).isdisjoint(ready):
            self._serve_gate()
        return [descriptor for descriptor in ready if descriptor in descriptors] if descriptors else []

    def _watch(self, descriptors: Sequence[int]) -> None:
        """Makes `sleep` poll these descriptors too."""
        self._poller.close()
        self._poller, self._watched = select.epoll(), descriptors  # not poll, which visits all of them at each call
        for descriptor in (*self._descriptors, *descriptors):
            self._poller.register(descriptor, select.EPOLLIN)

    def _look_at_gate(self) -> None:
        """Serves the gate every `GATE_S`, for an owner that hardly sleeps."""
        if time.monotonic() >= self._gate_at:
            self._serve_gate()

    def _serve_gate(self) -> None:
        for reason in self._gate.serve():
            self._note_refusal(reason)
        self._gate_at = time.monotonic() + GATE_S

    # Sending.

    def answer(self, message: Message, *parts: Part, own: Own = NOTHING, copy: bool = True) -> bool:
        """Replies with a header and `parts`, each in a separate frame.

        Returns False if the client is not connected or does not receive. Without `copy` the parts must not change.
        """
        words = header(Kind.ANSWER, message.service, message.number, own)
        return self.send(message.connection, words, *parts, copy=copy)

    def post(self, connection: bytes, service: Service, *parts: Part) -> bool:
        """Sends a message without a request, which may be lost; returns as `answer` does."""
        return self.send(connection, header(Kind.POST, service, 0), *parts)

    def send(self, connection: bytes, *parts: Part, copy: bool = True) -> bool:
        """Queues a message whose first part starts with a header; returns as `answer` does."""
        try:
            self._socket.send(connection, MORE)
            send_frames(self._socket, parts, copy)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def refuse(self, connection: bytes, reason: str, *, is_client: bool = True) -> None:
        """Ignores `connection` from now on, and sends it the `reason` if it is a client of the channel."""
        reason = escaped(reason[:MAX_REASON_BYTES]).rstrip(".")
        self._note_refusal(reason)
        self._ignored[connection] = None
        if len(self._ignored) > IGNORED_CONNECTIONS:
            del self._ignored[next(iter(self._ignored))]
        if is_client:
            words = HEADER.pack(MAGIC, Kind.REFUSED, 0, 0, 0, *NOTHING)
            self.send(connection, words + reason.encode()[:MAX_REASON_BYTES])

    def _note_refusal(self, reason: str) -> None:
        self.num_refused_messages += 1
        if self.num_refused_messages <= NUM_REPORTED or self.num_refused_messages % REPORT_EVERY == 0:
            some = f"; from now on only every {REPORT_EVERY}th is reported"
            more = some if self.num_refused_messages == NUM_REPORTED else ""
            self._report(f"one of the {self._what} was refused: {reason} ({self.num_refused_messages} so far{more})")

    def close(self) -> None:
        self._poller.close()
        self._gate.close()
        self._socket.close(linger=LINGER_MS)
        self._context.term()
