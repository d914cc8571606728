"""The caller's side of calls: calls to one other process, and the futures of their replies.

It has no thread of its own. A thread that waits for a reply reads replies, one thread at a time, and settles the
futures of the other threads as it does; these sleep until their future is settled or the reading thread stops. Replies
that no thread waits for are read when a call finds the queue full, or when the callee asks for room (`drain`), so
neither side blocks forever. If the peer dies, `fail` reads the replies that it had sent, as far as they are readable,
and wakes all waiting threads.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from echelon.errors import ConfigError, PeerLost, Refused, TransportError, TransportTimeout
from echelon.transport.channel import error_of
from echelon.transport.channel_callee import PATIENCE_S, current_turn
from echelon.transport.channel_ends import CallReader, CallWriter
from echelon.transport.codec import Buffer, Limits, decode, encode

SEND_S = 0.02  # how long a call waits for room before it reads replies
MISSING = object()  # the value of a call for a key that the peer does not have (any longer)


class Future:
    """The future reply to a call."""

    __slots__ = ("_calls", "_error", "_settled", "_value", "if_missing", "left_s", "number", "what")

    def __init__(self, calls: Calls, number: int, what: str, timeout_s: float) -> None:
        self._calls, self.number, self.what = calls, number, what
        self.left_s = timeout_s  # how long a wait may take
        self._settled = False
        self._value: Any = None
        self._error: BaseException | None = None
        self.if_missing: Callable[[], Any] | None = None  # called if the peer does not have the key (any longer)

    def wait(self, timeout_s: float | None = None) -> Any:
        """Returns the value of the call, or raises its error; without `timeout_s`, waits up to the call's timeout."""
        if not self._settled:
            self._calls.wait(self, self.left_s if timeout_s is None else timeout_s)
        if self._error is not None:
            raise self._error
        if self._value is MISSING and self.if_missing is not None:
            self._value = self.if_missing()
        return self._value

    def result(self, timeout_s: float | None = None) -> Any:
        """Same as `wait`."""
        return self.wait(timeout_s)

    def done(self) -> bool:
        """Returns whether the reply has arrived."""
        if not self._settled:
            self._calls.drain()
        return self._settled

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        self._value, self._error = value, error
        self._settled = True

    @property
    def settled(self) -> bool:
        return self._settled


class Calls:
    """The calls of this process to the process `peer`; replies arrive in any order."""

    def __init__(self, peer: str, writer: CallWriter, reader: CallReader, limits: Limits) -> None:
        self.peer, self._limits = peer, limits
        self._writer, self._reader = writer, reader
        self._numbers = itertools.count(1)
        self._futures: dict[int, Future] = {}
        self._changed = threading.Condition()
        self._reading = False
        self._unreadable = False  # a reply could not be read: those after it cannot either
        self._failure: Callable[[str], BaseException] | None = None  # makes the error of a failed call

    def begin(self, what: str, request: tuple[Any, ...], timeout_s: float) -> Future:
        """Sends `request` and returns its future; raises TransportTimeout if the peer does not receive it.

        `timeout_s` bounds sending and waiting together: the time spent on sending is deducted from the wait.
        """
        deadline = time.monotonic() + timeout_s
        number = next(self._numbers)
        try:
            frames = encode((number, *request), self._limits)
        except ConfigError as error:
            raise ConfigError(f"{what} cannot be sent to {self.peer!r}: {error}") from None
        future = self._futures[number] = Future(self, number, what, timeout_s)
        try:
            self._send(frames, what, timeout_s, deadline)
        except BaseException:
            self._futures.pop(number, None)
            raise
        future.left_s = max(0.0, deadline - time.monotonic())
        return future

    def _send(self, frames: Sequence[Buffer], what: str, timeout_s: float, deadline: float) -> None:
        def go_on() -> bool:
            if (turn := current_turn()) is not None:
                turn.end()
            self.drain()  # the peer may be blocked because its replies are not read
            return self._failure is None and time.monotonic() < deadline

        while self._failure is None:
            if self._writer.send(frames, SEND_S, go_on):
                return
            if not go_on():
                break
        if self._failure is not None:
            raise self._failure(what)
        raise TransportTimeout(
            f"{self.peer!r} did not receive {what} within {round(timeout_s, 2):g} s, so it could not be sent. Is it "
            "stopped or busy, or does it receive calls faster than it completes them?"
        )

    def post(self, request: tuple[Any, ...]) -> bool:
        """Sends a message without a reply if there is room now; returns whether it was sent."""
        return self._writer.send(encode((0, *request), self._limits), 0.0)

    def wait(self, future: Future, timeout_s: float) -> None:
        """Waits until `future` is settled; after `timeout_s`, forgets it and raises TransportTimeout."""
        deadline = time.monotonic() + timeout_s
        turn = current_turn()
        with self._changed:
            while self._reading and not future.settled:
                left_s = deadline - time.monotonic()
                if left_s <= 0.0:
                    raise self._late(future, timeout_s)
                if turn is not None:
                    turn.end()
                self._changed.wait(left_s)
            if future.settled:
                return
            self._reading = True
        try:
            if turn is not None and not self._read(future, time.monotonic() + PATIENCE_S):
                turn.end()
            if not self._read(future, deadline):
                raise self._late(future, timeout_s)
        finally:
            with self._changed:
                self._reading = False
                self._changed.notify_all()

    def _read(self, future: Future, deadline: float) -> bool:
        """Reads replies until `future` is settled; returns False at the `deadline`."""
        while not future.settled:
            left_s = 0.0 if self._failure is not None else deadline - time.monotonic()
            if self._take_next(max(0.0, left_s), future):
                continue
            if self._failure is not None:
                self._fail_rest()
                if not future.settled:  # it timed out before, so it is not in `_futures`
                    future.settle(None, self._failure(future.what))
            elif time.monotonic() >= deadline:
                return future.settled
        return True

    def _take_next(self, timeout_s: float, mine: Future | None = None) -> bool:
        """Reads one reply if one arrives; after the first unreadable reply, reads no more."""
        if self._unreadable:
            return False
        try:
            if (frames := self._reader.receive(timeout_s)) is None:
                return False
            self._take(frames, mine)
        except TransportError as error:
            self._unreadable = True
            if self._failure is None:
                self._failure = self._failure_of(error)
            return False
        return True

    def _failure_of(self, error: TransportError) -> Callable[[str], BaseException]:
        """Returns the function that makes the error of a call whose reply cannot be read because of `error`."""
        kind = Refused if isinstance(error, Refused) else PeerLost  # its folder was removed, so the peer is dead
        text = str(error)
        return lambda what: kind(f"{self.peer!r} can no longer answer {what}: {text}")

    def _take(self, frames: Sequence[Buffer], mine: Future | None) -> None:
        answer = decode(frames, self._limits, copy=False)
        if not isinstance(answer, tuple) or len(answer) < 2:
            raise Refused(f"a reply of {self.peer!r} was refused: it is a {type(answer).__name__}.")
        future = self._futures.pop(answer[0], None)
        if future is None:
            return  # its call has timed out
        match answer:
            case (_, "answer", value):
                future.settle(value)
            case (_, "missing"):
                future.settle(MISSING)
            case _:
                future.settle(None, error_of(answer, f"{future.what} in {self.peer!r}"))
        if future is not mine:
            with self._changed:
                self._changed.notify_all()

    def drain(self) -> None:
        """Reads the replies that have arrived, unless another thread is reading; never blocks."""
        with self._changed:
            if self._reading:
                return
            self._reading = True
        try:
            while self._take_next(0.0):
                pass
            if self._failure is not None:
                self._fail_rest()
        finally:
            with self._changed:
                self._reading = False
                self._changed.notify_all()

    def fail(self, failure: Callable[[str], BaseException]) -> None:
        """Fails all pending and later calls, each with the error that `failure` makes for it."""
        if self._failure is None:
            self._failure = failure
            self._writer.close()
            self._reader.wake()
            self.drain()

    def _fail_rest(self) -> None:
        assert self._failure is not None
        while self._take_next(0.0):  # replies sent before the peer died
            pass
        for number in list(self._futures):
            if future := self._futures.pop(number, None):
                future.settle(None, self._failure(future.what))
        with self._changed:
            self._changed.notify_all()

    def _late(self, future: Future, timeout_s: float) -> TransportTimeout:
        self._futures.pop(future.number, None)
        return TransportTimeout(
            f"{self.peer!r} did not answer {future.what} within {round(timeout_s, 2):g} s. Is it stopped, or busy? If "
            "it is slow, raise the timeout."
        )

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
