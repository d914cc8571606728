"""Processes that leave while they are measured: then there is nothing to measure."""

from __future__ import annotations

import signal

from echelon.engines.process import Engine, Exit
from echelon.errors import RunError


def check_running(engine: Engine) -> None:
    """Raises RunError once a process of `engine` has left."""
    for gone in engine.exits():
        raise RunError(_why(gone))


def _why(gone: Exit) -> str:
    if gone.failure is not None:
        return f"{gone.name} failed: {gone.failure.kind}: {gone.failure.message}\n\n{gone.failure.traceback}"
    how = f"was ended by {signal.Signals(gone.signal).name}" if gone.signal else f"left with code {gone.code}"
    return f"{gone.name} (process {gone.pid}) {how}, so there is nothing to measure."
