"""The callee's side of calls: runs those of one other process, one after another, and answers them.

Each caller has a thread here, so calls of one caller run in their order and those of different callers side by side. If
a call that runs here has to wait for an answer itself, its thread hands the reader over to a new one first, and ends
once its own call is answered: two processes that call each other, however deep, never wait for a thread. It waits
`PATIENCE_S` before it does, since most answers come sooner. No more than `MOST_AWAY` threads of a process are away from
their readers so; beyond that a thread keeps its reader, whose calls wait until its own is answered.

A caller that takes no answers in holds up its own calls alone: it is asked to make room. If it dies, whoever learns of
it calls `close`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from echelon.errors import Refused, TransportError
from echelon.transport.channel import failure, print_error
from echelon.transport.channel_ends import CallReader, CallWriter
from echelon.transport.codec import Limits, decode, encode

PATIENCE_S = 0.002
IDLE_S = 60.0
ROOM_S = 0.05  # how long an answer waits for room before the caller is asked for some
MOST_AWAY = 256

Handle = Callable[[tuple[Any, ...]], Any]  # the value of a request, which opens with its number; 0: a post

_here = threading.local()
_away = threading.BoundedSemaphore(MOST_AWAY)  # taken by a thread that handed its reader over, until it ends


class Missing(Exception):
    """A handler does not have (any more) what a call names; the caller may ask elsewhere."""


class Turn:
    """One thread's time at a reader; `succeed` starts the thread that goes on with it."""

    def __init__(self, succeed: Callable[[], None]) -> None:
        self._succeed = succeed
        self.over = False

    def end(self) -> None:
        """Hands the reader over, the first time; keeps it if too many have, or no thread can be started."""
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
    """The turn of this thread, if it serves a caller and has not handed the reader over."""
    turn: Turn | None = getattr(_here, "turn", None)
    return turn if turn is not None and not turn.over else None


def wait_for(event: threading.Event, timeout_s: float) -> bool:
    """Waits for `event`; whoever serves a caller hands its reader over first."""
    turn = current_turn()
    if turn is not None:
        if event.wait(min(PATIENCE_S, timeout_s)):
            return True
        turn.end()
    return event.wait(timeout_s)


class Callee:
    """Serves one `caller`."""

    def __init__(
        self,
        caller: str,
        reader: CallReader,
        writer: CallWriter,
        handle: Handle,
        limits: Limits,
        ask_room: Callable[[], None],
    ) -> None:
        """What `handle` raises is told to the caller; `ask_room` asks it, by another way, to take answers in."""
        self.caller, self.handle = caller, handle
        self._reader, self._writer, self._limits = reader, writer, limits
        self._ask_room = ask_room
        self._closed = False

    def start(self) -> None:
        """Starts a thread that serves the caller."""
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
        if not isinstance(request, tuple) or not request or not isinstance(request[0], int):
            raise Refused(f"it is no request but {str(request)[:80]}.")
        outcome = self._run(request)
        if (number := request[0]) == 0:
            return
        try:
            answer = encode((number, *outcome), self._limits)
        except BaseException as error:  # it is nothing that the wire carries, or another thread changes it just now
            answer = encode((number, *failure(error)), self._limits)
        while not self._closed and not self._writer.send(answer, ROOM_S, self._go_on):
            self._ask_room()

    def _go_on(self) -> bool:
        """Half of an answer is sent and the caller takes no more in: asks for room; whether to wait for it."""
        self._ask_room()
        return not self._closed

    def _run(self, request: tuple[Any, ...]) -> tuple[Any, ...]:
        try:
            return ("answer", self.handle(request))
        except Missing:
            return ("missing",)
        except BaseException as error:  # not ours to handle: it goes to the caller, with its traceback
            return failure(error)

    def close(self) -> None:
        """Takes nothing more in; a call that runs is not interrupted, and its answer is dropped."""
        self._closed = True
        self._reader.close()
        self._writer.close()
