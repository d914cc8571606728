"""When a run is over, and how far it is."""

from __future__ import annotations

from collections.abc import Collection

from echelon.config import StopConfig
from echelon.roles.source import RETURN_WINDOW


def stop_reason(stop: StopConfig, env_steps: int, returns: Collection[float], elapsed_s: float, epochs: int = 0) -> str:
    """Why the run is over, or "" while it is not."""
    if stop.steps and env_steps >= stop.steps:
        return "steps"
    if stop.epochs and epochs >= stop.epochs:
        return "epochs"
    if stop.minutes and elapsed_s >= 60 * stop.minutes:
        return "minutes"
    target = stop.until_return
    solved = target is not None and len(returns) >= RETURN_WINDOW and sum(returns) / len(returns) >= target
    return "return" if solved else ""


def progress(stop: StopConfig, env_steps: int, elapsed_s: float, epochs: int = 0) -> float:
    """The part of the way to the end that is behind the run, by whichever of its limits is nearest."""
    fractions = [0.0]
    if stop.steps:
        fractions.append(env_steps / stop.steps)
    if stop.epochs:
        fractions.append(epochs / stop.epochs)
    if stop.minutes:
        fractions.append(elapsed_s / (60 * stop.minutes))
    return min(max(fractions), 1.0)
