"""Signals to a long-running command: the first Ctrl-C, SIGTERM or SIGHUP stops it gracefully, a second immediately."""

from __future__ import annotations

import signal
import threading
import time
from types import TracebackType
from typing import Any

ECHO_S = 1.0  # `timeout` and shells signal a process and then its group: a repeat within this time is ignored


class Interrupts:
    """A context manager that records signals. Outside the main thread it installs no handlers."""

    def __init__(self, *numbers: signal.Signals) -> None:
        """Handles the signals `numbers`; SIGINT, SIGTERM and SIGHUP if none is given."""
        self._numbers = numbers or (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._first: float | None = None
        self.number = 0  # of the first signal
        self._previous: dict[int, Any] = {}

    @property
    def came(self) -> bool:
        return self._first is not None

    def check(self) -> None:
        """Raises KeyboardInterrupt, with the number of the signal, if one has come."""
        if self.came:
            raise KeyboardInterrupt(self.number)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # nohup
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        """Records the first signal, and raises KeyboardInterrupt on a later one.

        The first one only sets a flag because it can arrive at any point of the program: between two frames of a
        message, or in a finalizer, where Python ignores exceptions. pyzmq handles signals whenever a frame is released.
        """
        del frame
        now = time.monotonic()
        if self._first is None:
            self._first, self.number = now, number
        elif now - self._first > ECHO_S:
            raise KeyboardInterrupt(number)
