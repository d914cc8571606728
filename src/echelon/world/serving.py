"""The callee's side of a line: runs the calls of one other process, one after another, and answers them.

Each caller has a thread here, so calls of one caller run in their order and those of different callers side by side. If
a call that runs here has to wait for an answer itself, its thread hands the line over to a new one first, and ends once
its own call is answered: two processes that call each other, however deep, never wait for a thread. It waits
`PATIENCE_S` before it does, since most answers come sooner. No more than `MOST_AWAY` threads of a process are away from
their lines so; beyond that a thread keeps its line, whose calls wait until its own is answered.

A caller that takes no answers in holds up its own calls alone: it is asked to make room. If it dies, its line is closed
and what was kept for it is dropped.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

from echelon.errors import Refused, TransportError
from echelon.transport.codec import Limits, decode, encode
from echelon.world.functions import SERVICE, VALUE, KeyGone, Scope
from echelon.world.messages import TRACEBACK_CHARACTERS, Refusal, failure, print_error
from echelon.world.relay import Reader, Writer

PATIENCE_S = 0.002
IDLE_S = 60.0
ROOM_S = 0.05  # how long an answer waits for room before the caller is asked for some
MOST_AWAY = 256

_here = threading.local()
_away = threading.BoundedSemaphore(MOST_AWAY)  # taken by a thread that handed its line over, until it ends
_PENDING = object()  # kept in place of a result that is not there yet


class Turn:
    """One thread's time at a line; `succeed` starts the thread that goes on with it."""

    def __init__(self, succeed: Callable[[], None]) -> None:
        self._succeed = succeed
        self.over = False

    def end(self) -> None:
        """Hands the line over, the first time; keeps it if too many have, or no thread can be started."""
        if self.over or not _away.acquire(blocking=False):
            return
        try:
            self._succeed()
            self.over = True
        except RuntimeError:  # the machine has no more threads for us
            _away.release()

    def begin(self) -> None:
        _here.turn = self


def current_turn() -> Turn | None:
    """The turn of this thread, if it serves a line and has not handed it over."""
    turn: Turn | None = getattr(_here, "turn", None)
    return turn if turn is not None and not turn.over else None


def wait_for(event: threading.Event, timeout_s: float) -> bool:
    """Waits for `event`; whoever serves a line hands it over first."""
    turn = current_turn()
    if turn is not None:
        if event.wait(min(PATIENCE_S, timeout_s)):
            return True
        turn.end()
    return event.wait(timeout_s)


class Serving:
    """Serves the line of one `caller`."""

    def __init__(
        self, caller: str, reader: Reader, writer: Writer, scope: Scope, limits: Limits, ask_room: Callable[[], None]
    ) -> None:
        self.caller = caller
        self._reader, self._writer, self._scope, self._limits = reader, writer, scope, limits
        self._ask_room = ask_room
        self._kept: dict[int, Any] = {}
        self._keeping = threading.Lock()  # a result that comes and the word that nobody needs it may cross
        self._closed = False

    def start(self) -> None:
        """Starts a thread that serves the line."""
        threading.Thread(target=self._serve, name=f"echelon-serves-{self.caller}", daemon=True).start()

    def _serve(self) -> None:
        turn = Turn(self.start)
        turn.begin()
        while not self._closed and not turn.over:
            try:
                frames = self._reader.receive(IDLE_S)
                if frames is None:
                    continue
                request = decode(frames, self._limits, copy=False)
                del frames
                self._answer(request)
                del request
            except Refused as error:
                print_error(f"a call of {self.caller!r} was refused, and nothing more is taken from it: {error}")
                self.close()
            except TransportError:  # the caller is dead, and its shared memory gone with what it sent last
                self.close()
        if turn.over:
            _away.release()

    def _answer(self, request: object) -> None:
        match request:
            case (int(number), str(group), str(kind), str(name), tuple(args), dict(kwargs), bool(keep)):
                outcome = self._run(number if keep else 0, group, kind, name, args, kwargs)
            case _:
                raise Refused(f"it is no request but {str(request)[:80]}.")
        if not number:
            return
        try:
            answer = encode((number, *outcome), self._limits)
        except BaseException as error:  # it is nothing that the wire carries, or another thread changes it just now
            answer = encode((number, *told(error)), self._limits)
        while not self._closed and not self._writer.send(answer, ROOM_S, self._go_on):
            self._ask_room()

    def _go_on(self) -> bool:
        """Half of an answer is sent and the caller takes no more in: asks for room; whether to wait for it."""
        self._ask_room()
        return not self._closed

    def _run(
        self, keep_as: int, group: str, kind: str, name: str, args: tuple[Any, ...], kwargs: dict[Any, Any]
    ) -> tuple[Any, ...]:
        if keep_as:
            self._kept[keep_as] = _PENDING
        try:
            value = self._value(group, kind, name, args, kwargs)
        except KeyGone:
            self._kept.pop(keep_as, None)
            return ("missing",)
        except BaseException as error:  # not ours to handle: it goes to the caller, with its traceback
            self._kept.pop(keep_as, None)
            return told(error)
        if keep_as:
            with self._keeping:
                if keep_as in self._kept:  # else nobody needs it any more
                    self._kept[keep_as] = value
            value = None
        return ("answer", value)

    def _value(self, group: str, kind: str, name: str, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
        if kind == "function":
            return self._scope.function(name)(*args, **kwargs)
        if kind == SERVICE:
            return self._scope.bound(group, kind, name)(*args, **kwargs)
        if kind == VALUE:
            return self._scope.bound(group, kind, name)
        if kind == "kept":
            return self._kept[args[0]]
        if kind == "free":
            with self._keeping:
                for number in args[0]:
                    self._kept.pop(number, None)
            return None
        raise Refusal(f"{kind[:80]!r} is nothing that can be asked for.")

    def close(self) -> None:
        """Takes nothing more in; a call that runs is not interrupted, and its answer is dropped."""
        self._closed = True
        self._reader.close()
        self._writer.close()
        with self._keeping:
            self._kept.clear()


def told(error: BaseException) -> tuple[str, ...]:
    """How `error`, just caught, is told to the caller, even if it cannot say what it is."""
    try:
        return failure(error)
    except BaseException as worse:
        trace = "".join(traceback.format_exception(error))[-TRACEBACK_CHARACTERS:]
        text = f"(its text could not be made: {type(worse).__name__})"
        return ("failed", type(error).__qualname__, text, trace.encode(errors="replace").decode())
