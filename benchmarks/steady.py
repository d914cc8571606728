"""The speed of a peer: environment steps per second over the second half of a run."""

from __future__ import annotations

import json
import time
from pathlib import Path


class Progress:
    """Collects (seconds, environment steps) while a peer trains, and writes the result file for `peers.py`."""

    def __init__(self, peer: str, seconds: float, result: Path) -> None:
        self.peer, self.seconds, self.result = peer, seconds, result
        self.points: list[tuple[float, int]] = []
        self.mean_return = float("nan")
        self._started_s = time.monotonic()
        self._printed_s = 0.0

    def record(self, env_steps: int, mean_return: float) -> None:
        """Records that the learner has consumed `env_steps`; prints a line every five seconds."""
        elapsed_s = time.monotonic() - self._started_s
        if self.points and env_steps == self.points[-1][1]:
            return
        self.points.append((elapsed_s, env_steps))
        self.mean_return = mean_return
        if elapsed_s - self._printed_s >= 5.0:
            self._printed_s = elapsed_s
            print(f"  {self.peer}: {elapsed_s:5.1f} s, {env_steps:>10,} steps, return {mean_return:.4g}", flush=True)

    @property
    def over(self) -> bool:
        return time.monotonic() - self._started_s >= self.seconds

    def write(self, settings: dict[str, object]) -> None:
        """Writes the result file: the steady rate, the last mean return, and the settings."""
        result = {
            "env_steps_per_s": steady_rate(self.points),
            "mean_return": self.mean_return if self.mean_return == self.mean_return else None,
            "status": "finished",
            "settings": settings,
        }
        self.result.write_text(json.dumps(result, indent=2) + "\n")


def steady_rate(points: list[tuple[float, int]]) -> float:
    """Returns the steps per second between the first point after half of the time and the last point."""
    if len(points) < 2:
        raise ValueError(f"only {len(points)} progress points: the run is too short for a rate. Give it more seconds.")
    half_s = points[-1][0] / 2
    second_half = [point for point in points if point[0] >= half_s]
    first, last = (second_half if len(second_half) > 1 else points[-2:])[0], points[-1]
    return (last[1] - first[1]) / (last[0] - first[0])
