"""When a run is over."""

from __future__ import annotations

import time
from collections.abc import Collection

from echelon.config import StopConfig
from echelon.roles.source import RETURN_WINDOW


def stop_reason(
    stop: StopConfig, env_steps: int, returns: Collection[float], started_at: float, epochs: int = 0
) -> str:
    """Why the run is over, or "" while it is not."""
    if stop.steps and env_steps >= stop.steps:
        return "steps"
    if stop.epochs and epochs >= stop.epochs:
        return "epochs"
    if stop.minutes and time.time() - started_at >= 60 * stop.minutes:
        return "minutes"
    target = stop.until_return
    solved = target is not None and len(returns) >= RETURN_WINDOW and sum(returns) / len(returns) >= target
    return "return" if solved else ""
