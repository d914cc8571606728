"""The worker registry: reports to the user which workers join, leave and are lost, and refused handshakes.

There may be thousands of workers, so of each kind only the first few are reported, then every hundredth.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from echelon.roles.journal import Journal
from echelon.transport.episode_wire import socket_name
from echelon.transport.secret import REMEDY

ACTIVE_S = 60.0  # a worker is active if it sent a message within this time; a live worker sends more often
EVER = float("inf")
NUM_REPORTED, REPORT_EVERY = 10, 100


class WorkerRegistry:
    """Reports changes of the workers in a journal."""

    def __init__(self, journal: Journal, report: Callable[[str], None]) -> None:
        self._journal, self._report = journal, report
        self._names: dict[bytes, str] = {}
        self._lost = self._silent()  # already reported by a predecessor of this gateway
        self._counts = collections.Counter[str]()

    @property
    def num_active(self) -> int:
        return len(self._journal.sockets(ACTIVE_S))

    def seen(self, worker: str, *, is_new: bool = False) -> None:
        """Notes that a worker sent a message; `is_new` if it has just joined."""
        socket = socket_name(worker)
        self._names[socket] = worker
        if is_new:
            self._report_some("joined", f"worker {worker} joined")
        elif socket in self._lost:
            self._report_some("back", f"worker {worker} is back")
        self._lost.discard(socket)

    def left(self, worker: str) -> None:
        """Reports a worker that left, after the journal has forgotten it."""
        self._lost.discard(socket_name(worker))
        self._report_some("left", f"worker {worker} left")

    def look(self) -> None:
        """Reports workers that have fallen silent. Meant to be called about once a second."""
        known, silent = set(self._journal.sockets(EVER)), self._silent()
        for socket in silent - self._lost:
            unnamed = "a worker that joined before the gateway was restarted"
            worker = f"worker {self._names[socket]}" if socket in self._names else unnamed
            self._report_some("lost", f"{worker} has been silent for {ACTIVE_S:.0f} s")
        self._lost = silent
        self._names = {socket: name for socket, name in self._names.items() if socket in known}

    def _silent(self) -> set[bytes]:
        return set(self._journal.sockets(EVER)) - set(self._journal.sockets(ACTIVE_S))

    def _report_some(self, kind: str, text: str) -> None:
        self._counts[kind] += 1
        count = self._counts[kind]
        if count <= NUM_REPORTED or count % REPORT_EVERY == 0:
            more = f"; from now on only every {REPORT_EVERY}th is reported" if count == NUM_REPORTED else ""
            self._report(f"{text} ({self.num_active} active{more})")


class HandshakeReport:
    """Reports connections whose handshake was refused."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report, self._next = report, 1

    def look(self, num_refused: int) -> None:
        """Reports if `num_refused`, the number of refused handshakes so far, has reached the next threshold."""
        if num_refused >= self._next:
            self._next = REPORT_EVERY * (num_refused // REPORT_EVERY + 1)
            self._report(f"a connection was refused ({num_refused} so far): its secret is not the learner's. {REMEDY}")
