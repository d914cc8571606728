"""The common part of roles that run a server: they step the server and publish its times and figures."""

from __future__ import annotations

import time
from typing import Any, ClassVar, Protocol

from echelon.roles.context import Context, Station

REPORT_S = 1.0


class SteppedServer(Protocol):
    """A server that handles requests step by step."""

    def step(self, timeout_s: float) -> bool:
        """Handles pending requests; waits up to `timeout_s` for one. Returns whether there was any."""

    def close(self) -> None: ...


class Serving:
    """A role that runs a server. Subclasses create the server and return its times and figures."""

    KIND: ClassVar[str]  # the key of its figures in gauge.FIGURES
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

    def report(self, text: str) -> None:
        """Reports `text` to the user."""
        self.station.report("message", text)

    def times(self) -> dict[str, float]:
        """Returns the server's time so far in seconds, by phase."""
        raise NotImplementedError

    def figures(self) -> dict[str, Any]:
        """Returns the server's figures for the metrics."""
        raise NotImplementedError

    def _show(self) -> None:
        self.station.gauge.show_figures(self.KIND, self.figures())

    def close(self) -> None:
        self._show()
        self.server.close()
        self.station.close()
