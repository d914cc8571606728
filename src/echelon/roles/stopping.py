"""When a run is over, and how far it is."""

from __future__ import annotations

from collections.abc import Collection

from echelon.config import StopConfig

RETURN_WINDOW = 100  # episodes whose mean return counts


def stop_reason(
    stop: StopConfig, env_steps: int, returns: Collection[float], elapsed_s: float, episodes: int = 0
) -> str:
    """Why the run is over, or "" while it is not."""
    if stop.steps and env_steps >= stop.steps:
        return "steps"
    if stop.episodes and episodes >= stop.episodes:
        return "episodes"
    if stop.minutes and elapsed_s >= 60 * stop.minutes:
        return "minutes"
    target = stop.until_return
    solved = target is not None and len(returns) >= RETURN_WINDOW and sum(returns) / len(returns) >= target
    return "return" if solved else ""


def progress(stop: StopConfig, env_steps: int, elapsed_s: float, episodes: int = 0) -> float:
    """The part of the way to the end that is behind the run, by whichever of its limits is nearest."""
    fractions = [0.0]
    if stop.steps:
        fractions.append(env_steps / stop.steps)
    if stop.episodes:
        fractions.append(episodes / stop.episodes)
    if stop.minutes:
        fractions.append(elapsed_s / (60 * stop.minutes))
    return min(max(fractions), 1.0)
