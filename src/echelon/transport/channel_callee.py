"""The callee's side of calls: runs the calls of one other process in order, and replies to them.

Each caller has a thread here, so the calls of one caller run in order and the calls of different callers run
concurrently. If a running call must itself wait for a reply, its thread first hands the reader over to a new thread,
and ends once its own call is answered. So two processes that call each other, at any depth, never wait for a thread. A
thread waits `PATIENCE_S` before the handover, because most replies arrive sooner. At most `MOST_AWAY` threads of a
process can have handed over their readers; beyond that a thread keeps its reader, and the caller's next calls wait.

A caller that does not read its replies delays only its own calls: it is asked to make room. If a caller dies, the
process that detects it calls `close`.
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
ROOM_S = 0.05  # how long a reply waits for room before the caller is asked to make some
MOST_AWAY = 256

Handle = Callable[[tuple[Any, ...]], Any]  # maps a request, which starts with its number (0: a post), to its value

_here = threading.local()
_away = threading.BoundedSemaphore(MOST_AWAY)  # held by each thread that handed over its reader, until it ends


class Missing(Exception):
    """A handler does not have (any longer) the key of a call; the caller may try another process."""


class Turn:
    """The time during which one thread uses a reader; `succeed` starts the thread that takes it over."""

    def __init__(self, succeed: Callable[[], None]) -> None:
        self._succeed = succeed
        self.over = False

    def end(self) -> None:
        """Hands over the reader, once; keeps it if too many threads have done so, or no thread can be started."""
        if self.over or not _away.acquire(blocking=False):
            return
        try:
            self._succeed()
            self.over = True
        except RuntimeError:  # the thread limit is reached
            _away.release()

    def begin(self) -> None:
        _here.turn = self


def current_turn() -> Turn | None:
    """Returns the turn of this thread, if it serves a caller and has not handed over the reader."""
    turn: Turn | None = getattr(_here, "turn", None)
    return turn if turn is not None and not turn.over else None


def wait_for(event: threading.Event, timeout_s: float) -> bool:
    """Waits for `event`; a thread that serves a caller hands over its reader first."""
    turn = current_turn()
    if turn is not None:
        if event.wait(min(PATIENCE_S, timeout_s)):
            return True
        turn.end()
    return event.wait(timeout_s)


class Callee:
    """Serves the calls of one `caller`."""

    def __init__(
        self,
        caller: str,
        reader: CallReader,
        writer: CallWriter,
        handle: Handle,
        limits: Limits,
        ask_room: Callable[[], None],
    ) -> None:
        """Sends exceptions of `handle` to the caller; `ask_room` asks the caller, by other means, to read replies."""
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
                print_error(f"a call of {self.caller!r} was refused, and no more of its calls are accepted: {error}")
                self.close()
            except TransportError:  # the caller is dead, and its shared memory was removed
                self.close()
        if turn.over:
            _away.release()

    def _answer(self, request: object) -> None:
        if not isinstance(request, tuple) or not request or not isinstance(request[0], int):
            raise Refused(f"it is not a request: {str(request)[:80]}.")
        outcome = self._run(request)
        if (number := request[0]) == 0:
            return
        try:
            answer = encode((number, *outcome), self._limits)
        except BaseException as error:  # the codec cannot encode it, or another thread is changing it
            answer = encode((number, *failure(error)), self._limits)
        while not self._closed and not self._writer.send(answer, ROOM_S, self._go_on):
            self._ask_room()

    def _go_on(self) -> bool:
        """Asks for room after part of a reply was sent; returns whether to keep waiting."""
        self._ask_room()
        return not self._closed

    def _run(self, request: tuple[Any, ...]) -> tuple[Any, ...]:
        try:
            return ("answer", self.handle(request))
        except Missing:
            return ("missing",)
        except BaseException as error:  # the caller handles it: it is sent with its traceback
            return failure(error)

    def close(self) -> None:
        """Stops receiving calls; a running call is not interrupted, and its reply is dropped."""
        self._closed = True
        self._reader.close()
        self._writer.close()
