"""The stages of a start: what a run does before its first update."""

from __future__ import annotations

import time
from collections.abc import Callable

ANNOUNCED_S = 2.0  # a stage that takes longer is announced; the time doubles until it is announced again


class Stages:
    """Times the stages of a start, for the summary, and announces those that take long."""

    def __init__(
        self,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` raises KeyboardInterrupt if the user wants to leave."""
        self.report, self._clock, self._check = report, clock, check
        self.seconds: dict[str, float] = {}  # of each stage that has ended
        self.name = self._text = ""  # of the current stage, if there is one
        self._begun, self._next_s = clock(), ANNOUNCED_S

    def begin(self, name: str, text: str = "") -> None:
        """Ends the current stage and begins another one; `text` says what is done in it."""
        if name != self.name:
            self.end()
            self.name, self._text, self._begun, self._next_s = name, text, self._clock(), ANNOUNCED_S

    def look(self) -> None:
        """Announces the current stage if it takes long; called several times a second, as the user may interrupt it."""
        self._check()
        elapsed_s = self._clock() - self._begun
        if self._text and elapsed_s >= self._next_s:
            self.report(f"{self._text} ({elapsed_s:.0f} s so far)")
            self._next_s = 2 * elapsed_s

    def end(self) -> None:
        if self.name:
            self.seconds[self.name] = round(self._clock() - self._begun, 3)
            self.name = ""
