"""Servers as roles of a run: each steps its server, and shows where its time goes and how it does."""

from __future__ import annotations

import time
from typing import Any, ClassVar, Protocol

from echelon.roles.context import Context, Station

REPORT_S = 1.0


class SteppedServer(Protocol):
    """What answers others."""

    def step(self, timeout_s: float) -> bool:
        """Answers what has come; waits at most `timeout_s` for something. Whether there was anything."""

    def close(self) -> None: ...


class Serving:
    """A role around a server, which its subclass makes and gives account of."""

    KIND: ClassVar[str]  # by which its figures are named
    server: SteppedServer

    def __init__(self, context: Context) -> None:
        self.station, self.finished, self.next_report = Station(context), False, 0.0

    def step(self, timeout_s: float) -> bool:
        if self.station.stop_requested:
            self.finished = True
            return False
        worked = self.server.step(timeout_s)
        self.station.phases |= self.times()
        self.station.progress += 1
        now = time.perf_counter()
        if now >= self.next_report:
            self.next_report = now + REPORT_S
            self._show()
        self.station.tick(now)
        return worked

    def times(self) -> dict[str, float]:
        """Where the server's time went so far, by phase."""
        raise NotImplementedError

    def figures(self) -> dict[str, Any]:
        """What to show of it, for the record."""
        raise NotImplementedError

    def _show(self) -> None:
        self.station.gauge.show_figures(self.KIND, self.figures())

    def close(self) -> None:
        self._show()
        self.server.close()
        self.station.close()
