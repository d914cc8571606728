"""Messages between nodes: requests, replies, and the Messenger that sends and handles them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.errors import ConfigError, EchelonError, PeerLost, Refused, TransportTimeout
from echelon.transport.channel import Refusal, error_of, failure, print_error
from echelon.transport.codec import Buffer, Limits, decode, encode
from echelon.world.directory import Member
from echelon.world.endpoint import Arrival, Endpoint

DRAIN_S = 2.0  # how long messages of a dead process may take from this host's sockets to this one
MAX_ECHOES = 8  # bounds `drain` while others keep sending


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """A call (`number` above 0, repeated in its reply) or a post (0, without a reply)."""

    number: int
    sender: str
    incarnation: str
    function: str
    args: tuple[Any, ...]

    def to_wire(self) -> tuple[Any, ...]:
        return (self.number, self.sender, self.incarnation, self.function, self.args)

    @classmethod
    def from_wire(cls, message: object) -> ControlRequest:
        """Returns the request that another process sent; raises Refused on anything else."""
        match message:
            case (int(number), str(sender), str(incarnation), str(function), tuple(args)):
                return cls(number, sender, incarnation, function, args)
        raise Refused(f"a message was refused: it is a {type(message).__name__}, not a request.")


@dataclass(slots=True)
class PendingCall:
    """A call that waits for its reply."""

    member: Member
    function: str
    on_settled: Callable[[PendingCall], None] | None = None  # called in the node's thread
    number: int = 0  # of a call started by `begin`
    settled: bool = False
    value: Any = None
    error: EchelonError | None = None

    def settle(self, outcome: object) -> None:
        """Settles with the peer's reply; raises Refused if it is not a valid one."""
        match outcome:
            case (_, "answer", value):
                self.value = value
            case _:
                self.error = error_of(outcome, f"{self.function}() in {self.member.name!r}")
        self._notify()

    def lose(self, error: EchelonError) -> None:
        """Settles with `error`: no reply will arrive."""
        self.error = error
        self._notify()

    def _notify(self) -> None:
        self.settled = True
        if self.on_settled is not None:
            self.on_settled(self)


class Deferred:
    """A reply that a handler returns now and settles later: call `settle` in the node's thread; only the first counts.

    Without `settle` the caller waits until its timeout.
    """

    def __init__(self) -> None:
        self._send: Callable[[Any], None] | None = None
        self._value: tuple[Any, ...] = ()  # empty, or the reply

    def settle(self, value: Any) -> None:
        if not self._value:
            self._value = (value,)
            if self._send is not None:
                self._send(value)

    def attach(self, send: Callable[[Any], None]) -> None:
        """Sets the function that sends the reply, and calls it immediately if the reply is settled."""
        self._send = send
        if self._value:
            send(self._value[0])


class Messenger:
    """Sends requests and replies; the node decides who may send what, in `_why_refused` and `_run_control`."""

    def __init__(self, me: Member, endpoint: Endpoint, limits: Limits) -> None:
        self.name, self.limits = me.name, limits
        self.on_error: Callable[[str], None] = print_error  # receives the error of a post that failed here
        self.refused = 0  # invalid messages; further messages of their connection are dropped
        self._me, self._endpoint = me, endpoint
        self.open_end = endpoint.open_end
        self._pending: dict[int, PendingCall] = {}
        self._numbers = itertools.count(1)
        self._num_arrivals = 0
        self._handlers: dict[str, Callable[..., Any]] = {}

    @property
    def address(self) -> str:
        """The address where this member is bound; the address of the host is the one that others join."""
        return self._endpoint.address

    @property
    def num_turned_away(self) -> int:
        """Number of connections that were refused because their secret was another, or missing."""
        return self._endpoint.num_turned_away

    @property
    def incarnation(self) -> str:
        """Distinguishes this process from earlier and later ones of the same name."""
        return self._me.incarnation

    def serve(self, function: str, handler: Callable[..., Any]) -> None:
        """Lets others call `handler` as `function`."""
        if function.startswith("_"):
            raise ConfigError(f"{function!r} cannot be served: names with a leading underscore are reserved.")
        self._handlers[function] = handler

    def abandon(self, pending: PendingCall) -> None:
        """Stops waiting for a call that `begin` started; a late reply is ignored."""
        self._pending.pop(pending.number, None)

    def drain(self) -> None:
        """Serves the messages that reached this process before this call, including those of members that died since.

        ZeroMQ reads a few messages of each socket in turn. The node therefore sends itself an echo, again and again,
        until nothing else arrives before the echo.
        """
        deadline = time.monotonic() + DRAIN_S
        for _ in range(MAX_ECHOES):
            if self._endpoint.closed or time.monotonic() >= deadline:
                return
            num_before = self._num_arrivals
            echo = self._begin(self._me, "_echo", (), lambda echo: None)
            while not echo.settled and (left_s := deadline - time.monotonic()) > 0.0:
                self.poll(left_s)
            self.abandon(echo)
            if self._num_arrivals - num_before <= 2:  # the echo and its reply
                return

    def _begin(
        self, member: Member, function: str, args: tuple[Any, ...], on_settled: Callable[[PendingCall], None]
    ) -> PendingCall:
        number = next(self._numbers)
        pending = self._pending[number] = PendingCall(member, function, on_settled, number)
        try:
            if not self._endpoint.send(member.address, self._frames(number, function, args)):
                raise TransportTimeout(
                    f"{member.name!r} reads no messages: the queue of {self.name!r} to it is full, so {function}() "
                    "cannot be called."
                )
        except BaseException:
            del self._pending[number]
            raise
        return pending

    def _lose_pending(self, member: Member, why: str) -> None:
        """Fails the calls to `member` that `begin` started: no reply will arrive."""
        for pending in [one for one in self._pending.values() if one.number and one.member == member]:
            self.abandon(pending)
            what = f"{member.name!r} left before it answered {pending.function}() of {self.name!r}: {why}."
            pending.lose(PeerLost(what))

    def _frames(self, number: int, function: str, args: tuple[Any, ...]) -> list[Buffer]:
        return encode(ControlRequest(number, self.name, self._me.incarnation, function, args).to_wire(), self.limits)

    def _take_request(self, arrival: Arrival) -> None:
        try:
            request = ControlRequest.from_wire(decode(arrival.frames, self.limits))
        except Refused:
            self.refused += 1
            self._endpoint.ignore(arrival.connection)
            return
        outcome: tuple[Any, ...]
        if why := self._why_refused(request):
            self.refused += 1
            outcome = ("refused", why)
        else:
            outcome = self._run(request)
        if request.number and isinstance(outcome[-1], Deferred):
            outcome[-1].attach(lambda value: self._answer(arrival.connection, request.number, ("answer", value)))
        elif request.number:
            self._answer(arrival.connection, request.number, outcome)
        elif outcome[0] == "failed":
            self.on_error(f"{request.function}(), posted by {request.sender!r} to {self.name!r}, failed: {outcome[-1]}")

    def _run(self, request: ControlRequest) -> tuple[Any, ...]:
        try:
            if request.function.startswith("_"):
                return ("answer", self._run_control(request))
            if (handler := self._handlers.get(request.function)) is None:
                served = ", ".join(sorted(self._handlers)) or "nothing"
                raise Refusal(f"{self.name!r} serves no function {request.function[:80]!r}; it serves {served}.")
            return ("answer", handler(*request.args))
        except Exception as error:  # sent to the caller, with its traceback
            return failure(error, posted=not request.number)

    def _answer(self, connection: bytes, number: int, outcome: tuple[Any, ...]) -> None:
        try:
            frames = encode((number, *outcome), self.limits)
        except ConfigError as error:  # the codec cannot encode what the handler returned
            frames = encode((number, *failure(error)), self.limits)
        self._endpoint.answer(connection, frames)

    def _take_answer(self, arrival: Arrival) -> None:
        try:
            outcome = decode(arrival.frames, self.limits)
            number = outcome[0] if isinstance(outcome, tuple) and outcome else None
            pending = self._pending.get(number) if isinstance(number, int) else None
            if pending is not None and pending.member.address == arrival.address:  # else it arrived too late
                pending.settle(outcome)
                if pending.number:
                    self.abandon(pending)
        except Refused:
            self.refused += 1

    def poll(self, timeout_s: float = 0.0, fds: Sequence[int] = ()) -> bool:
        """Serves the received messages."""
        raise NotImplementedError

    def _why_refused(self, request: ControlRequest) -> str:
        """Returns why the sender's requests are refused, or ""."""
        raise NotImplementedError

    def _run_control(self, request: ControlRequest) -> Any:
        """Runs one of the world's own functions, whose names have a leading underscore."""
        raise NotImplementedError
