"""Attendance: tells the user which workers come, leave and are lost, and that somebody was not let in.

Of every kind of news the first few are told, then every hundredth: there may be thousands of workers.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from echelon.roles.journal import Journal
from echelon.transport.episode_wire import socket_name
from echelon.transport.secret import SECRET_VARIABLE

HEARD_S = 60.0  # a worker is here that said something within this time; one that is alive does so more often
EVER = float("inf")
NUM_REPORTED, REPORT_EVERY = 10, 100


class WorkerRegistry:
    """What is told of the workers in a journal."""

    def __init__(self, journal: Journal, report: Callable[[str], None]) -> None:
        self._journal, self._report = journal, report
        self._names: dict[bytes, str] = {}
        self._lost = self._silent()  # told by a predecessor of this gateway
        self._counts = collections.Counter[str]()

    @property
    def num_here(self) -> int:
        return len(self._journal.sockets(HEARD_S))

    def heard(self, worker: str, *, is_new: bool = False) -> None:
        """A worker said something; `is_new`: it has just arrived."""
        socket = socket_name(worker)
        self._names[socket] = worker
        if is_new:
            self._report_some("came", f"worker {worker} came")
        elif socket in self._lost:
            self._report_some("back", f"worker {worker} is there again")
        self._lost.discard(socket)

    def left(self, worker: str) -> None:
        """A worker has gone, and the journal has forgotten it."""
        self._lost.discard(socket_name(worker))
        self._report_some("left", f"worker {worker} left")

    def look(self) -> None:
        """Finds those that are lost; once a second will do."""
        known, silent = set(self._journal.sockets(EVER)), self._silent()
        for socket in silent - self._lost:
            worker = f"worker {self._names[socket]}" if socket in self._names else "a worker of before"
            self._report_some("lost", f"{worker} was not heard for {HEARD_S:.0f} s")
        self._lost = silent
        self._names = {socket: name for socket, name in self._names.items() if socket in known}

    def _silent(self) -> set[bytes]:
        return set(self._journal.sockets(EVER)) - set(self._journal.sockets(HEARD_S))

    def _report_some(self, kind: str, text: str) -> None:
        self._counts[kind] += 1
        count = self._counts[kind]
        if count <= NUM_REPORTED or count % REPORT_EVERY == 0:
            more = f"; from now on every {REPORT_EVERY}th is told" if count == NUM_REPORTED else ""
            self._report(f"{text} ({self.num_here} here{more})")


class HandshakeReport:
    """What is told of connections that did not get as far as a message."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report, self._next = report, 1

    def look(self, num_refused: int) -> None:
        """So many were refused so far."""
        if num_refused >= self._next:
            self._next = REPORT_EVERY * (num_refused // REPORT_EVERY + 1)
            self._report(
                f"somebody was not let in ({num_refused} times so far): workers need the learner's {SECRET_VARIABLE}, "
                "and theirs is another, or none"
            )
