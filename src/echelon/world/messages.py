"""What nodes say to each other: requests and answers, and who sends and takes them."""

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

LAST_WORDS_S = 2.0  # how long what a dead process sent may take from this host's sockets to us
MAX_ECHOES = 8  # where others never cease to speak


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """A call (`number` above 0, its answer carries it) or a post (0)."""

    number: int
    sender: str
    incarnation: str
    function: str
    args: tuple[Any, ...]

    def to_wire(self) -> tuple[Any, ...]:
        return (self.number, self.sender, self.incarnation, self.function, self.args)

    @classmethod
    def from_wire(cls, message: object) -> ControlRequest:
        """The request another process sent; raises Refused on anything else."""
        match message:
            case (int(number), str(sender), str(incarnation), str(function), tuple(args)):
                return cls(number, sender, incarnation, function, args)
        raise Refused(f"a message was refused: it is no request but a {type(message).__name__}.")


@dataclass(slots=True)
class PendingCall:
    """A call that waits for its answer."""

    member: Member
    function: str
    on_settled: Callable[[PendingCall], None] | None = None  # called in the node's thread
    number: int = 0  # of a call that `begin` began
    settled: bool = False
    value: Any = None
    error: EchelonError | None = None

    def settle(self, outcome: object) -> None:
        """Takes what the peer said; raises Refused if that is no answer."""
        match outcome:
            case (_, "answer", value):
                self.value = value
            case _:
                self.error = error_of(outcome, f"{self.function}() in {self.member.name!r}")
        self._notify()

    def lose(self, error: EchelonError) -> None:
        """Settles with `error`: nobody will answer any more."""
        self.error = error
        self._notify()

    def _notify(self) -> None:
        self.settled = True
        if self.on_settled is not None:
            self.on_settled(self)


class Deferred:
    """What a handler returns whose answer comes later: `settle` it in the node's thread; only the first time counts."""

    def __init__(self) -> None:
        self._send: Callable[[Any], None] | None = None
        self._value: tuple[Any, ...] = ()  # empty, or the answer

    def settle(self, value: Any) -> None:
        if not self._value:
            self._value = (value,)
            if self._send is not None:
                self._send(value)

    def attach(self, send: Callable[[Any], None]) -> None:
        """Says how the answer is sent; at once if there is one."""
        self._send = send
        if self._value:
            send(self._value[0])


class Messenger:
    """What asks others and answers them; who may say what is for the node to decide, in `_why_stranger` and `_obey`."""

    def __init__(self, me: Member, endpoint: Endpoint, limits: Limits) -> None:
        self.name, self.limits = me.name, limits
        self.on_error: Callable[[str], None] = print_error  # gets the error of a post that failed here
        self.refused = 0  # messages that broke the rules; nothing more is taken from that connection
        self._me, self._endpoint = me, endpoint
        self.open_end = endpoint.open_end
        self._pending: dict[int, PendingCall] = {}
        self._numbers = itertools.count(1)
        self._num_arrivals = 0
        self._handlers: dict[str, Callable[..., Any]] = {}

    @property
    def address(self) -> str:
        """Where this member is bound; of the host: what the others join."""
        return self._endpoint.address

    @property
    def num_turned_away(self) -> int:
        """Who knocked with another secret than ours, or none."""
        return self._endpoint.num_turned_away

    @property
    def incarnation(self) -> str:
        """Tells this life of the name from others."""
        return self._me.incarnation

    def serve(self, function: str, handler: Callable[..., Any]) -> None:
        """Lets others call `handler` as `function`."""
        if function.startswith("_"):
            raise ConfigError(f"{function!r} cannot be served: names with a leading underscore are the world's own.")
        self._handlers[function] = handler

    def abandon(self, pending: PendingCall) -> None:
        """Waits no longer for what `begin` began."""
        self._pending.pop(pending.number, None)

    def drain(self) -> None:
        """Serves what had reached this process before now, also of those who are dead by now.

        It writes to itself until nothing but its own word comes: ZeroMQ reads a little of each socket in turn.
        """
        deadline = time.monotonic() + LAST_WORDS_S
        for _ in range(MAX_ECHOES):
            if self._endpoint.closed or time.monotonic() >= deadline:
                return
            num_before = self._num_arrivals
            echo = self._begin(self._me, "_echo", (), lambda echo: None)
            while not echo.settled and (left_s := deadline - time.monotonic()) > 0.0:
                self.poll(left_s)
            self.abandon(echo)
            if self._num_arrivals - num_before <= 2:  # the word and its answer
                return

    def _begin(
        self, member: Member, function: str, args: tuple[Any, ...], on_settled: Callable[[PendingCall], None]
    ) -> PendingCall:
        number = next(self._numbers)
        pending = self._pending[number] = PendingCall(member, function, on_settled, number)
        try:
            if not self._endpoint.send(member.address, self._frames(number, function, args)):
                raise TransportTimeout(
                    f"{member.name!r} takes nothing in: the queue of {self.name!r} to it is full, so {function}() "
                    "cannot be called."
                )
        except BaseException:
            del self._pending[number]
            raise
        return pending

    def _lose_pending(self, member: Member, why: str) -> None:
        """Nobody answers what `begin` asked of `member`."""
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
        if why := self._why_stranger(request):
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
                return ("answer", self._obey(request))
            if (handler := self._handlers.get(request.function)) is None:
                served = ", ".join(sorted(self._handlers)) or "nothing"
                raise Refusal(f"{self.name!r} serves no function {request.function[:80]!r}; it serves {served}.")
            return ("answer", handler(*request.args))
        except Exception as error:  # not ours to handle: it goes to the caller, with its traceback
            return failure(error, posted=not request.number)

    def _answer(self, connection: bytes, number: int, outcome: tuple[Any, ...]) -> None:
        try:
            frames = encode((number, *outcome), self.limits)
        except ConfigError as error:  # the handler returned what the wire does not carry
            frames = encode((number, *failure(error)), self.limits)
        self._endpoint.answer(connection, frames)

    def _take_answer(self, arrival: Arrival) -> None:
        try:
            outcome = decode(arrival.frames, self.limits)
            number = outcome[0] if isinstance(outcome, tuple) and outcome else None
            pending = self._pending.get(number) if isinstance(number, int) else None
            if pending is not None and pending.member.address == arrival.address:  # else: it came too late
                pending.settle(outcome)
                if pending.number:
                    self.abandon(pending)
        except Refused:
            self.refused += 1

    def poll(self, timeout_s: float = 0.0, fds: Sequence[int] = ()) -> bool:
        """Serves what came in."""
        raise NotImplementedError

    def _why_stranger(self, request: ControlRequest) -> str:
        """Why the sender may ask for nothing here, or ""."""
        raise NotImplementedError

    def _obey(self, request: ControlRequest) -> Any:
        """Does what one of the world's own functions, with a leading underscore, says."""
        raise NotImplementedError
