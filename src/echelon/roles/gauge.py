"""Gauges: the progress, time per phase and figures that a running role publishes in a row of shared memory.

Every role is the only writer of its row; the supervisor reads it at any time. The newest value wins and nobody waits.
A row outlives its writer, so the last values of a dead role are not lost; its successor resets them. No stop condition
and no schedule depends on a gauge: the learner keeps the exact counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from echelon.transport.segments import join_segment

PHASES = ("env", "act", "wait", "transfer", "learn", "exchange")  # exchange: communication between several learners
FIGURES = {  # further values that roles of a kind publish for the metrics
    "inference": ("rounds", "mean_rows", "missed", "refused"),
    "shards": ("answers", "items", "refused"),
    "gateway": (
        *("workers", "episodes", "evaluations", "interactions", "repeated", "interactions_per_hour", "transitions"),
        *("refused", "handling_mean_ms", "handling_p50_ms", "handling_p95_ms", "handling_max_ms"),
    ),
}
INCARNATION, PROGRESS, STEPS = 0, 1, 2
NUM_WORDS, NUM_FIGURES = 3, 14
ROW_BYTES = 8 * (NUM_WORDS + len(PHASES) + NUM_FIGURES)


class Gauge:
    """The row of the role `name`."""

    def __init__(self, session: Path, name: str) -> None:
        folder = session / "gauges"
        folder.mkdir(exist_ok=True)
        memory = join_segment(folder / name, ROW_BYTES)
        self._words = memory[: 8 * NUM_WORDS].view(np.int64)
        self._phases, self._figures = np.split(memory[8 * NUM_WORDS :].view(np.float64), [len(PHASES)])

    # The role's side.

    def begin(self, incarnation: int) -> None:
        """Takes over the row for this incarnation and resets it. The previous incarnation must be dead."""
        self._words[INCARNATION] = 0  # invalid until the values are reset
        self._words[PROGRESS], self._words[STEPS], self._phases[:], self._figures[:] = 0, 0, 0.0, np.nan
        self._words[INCARNATION] = incarnation + 1

    def show(self, progress: int, phases: Mapping[str, float], env_steps: int = 0) -> None:
        self._words[STEPS] = env_steps
        self._phases[:] = [phases[phase] for phase in PHASES]
        self._words[PROGRESS] = progress

    def show_figures(self, kind: str, figures: Mapping[str, Any]) -> None:
        """Publishes figures of a role of this kind. Figures that are not passed are published as unknown."""
        names = FIGURES[kind]
        assert set(figures) <= set(names), f"{sorted(set(figures) - set(names))} are not in FIGURES[{kind!r}]"
        self._figures[: len(names)] = [figures.get(name, np.nan) for name in names]

    # The supervisor's side.

    def progress(self, incarnation: int) -> int:
        """Returns the progress of this incarnation, or 0 if it has not begun."""
        return int(self._words[PROGRESS]) if self._words[INCARNATION] == incarnation + 1 else 0

    @property
    def env_steps(self) -> int:
        """The environment steps that the newest incarnation of an actor has taken."""
        return int(self._words[STEPS])

    def phases(self, incarnation: int) -> dict[str, float]:
        """Returns the seconds that this incarnation has spent in each phase."""
        seconds = self._phases if self._words[INCARNATION] == incarnation + 1 else np.zeros(len(PHASES))
        return dict(zip(PHASES, seconds.tolist(), strict=True))

    def figures(self, kind: str) -> dict[str, float]:
        """Returns the known figures."""
        if not self._words[INCARNATION]:
            return {}
        values = self._figures.tolist()
        shown = {name: value for name, value in zip(FIGURES[kind], values, strict=False) if value == value}  # no NaN
        return {name: int(value) if value.is_integer() else value for name, value in shown.items()}
