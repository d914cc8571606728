"""How a user ends a run: Ctrl-C and SIGTERM, once in good order, a second time at once."""

from __future__ import annotations

import signal
import threading
import time
from types import TracebackType
from typing import Any

ECHO_S = 1.0  # `timeout` and shells signal a process and then its group: that is still the first time


class Interrupts:
    """Notes the signals that come while it is entered; in other threads than the main one they are somebody else's."""

    def __init__(self, *numbers: signal.Signals) -> None:
        """Of those `numbers`; of SIGINT and SIGTERM if none is given."""
        self._numbers = numbers or (signal.SIGINT, signal.SIGTERM)
        self._first: float | None = None
        self._previous: dict[int, Any] = {}

    @property
    def came(self) -> bool:
        return self._first is not None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        """Only notes the first: it may come in the middle of anything."""
        del number, frame
        now = time.monotonic()
        if self._first is None:
            self._first = now
        elif now - self._first > ECHO_S:
            raise KeyboardInterrupt
