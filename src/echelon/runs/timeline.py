"""Timelines: when each trajectory of an actor and each batch of a learner began and ended, if `run.timeline` is set.

Every role at the head appends to its own file, `timeline/ROLE.jsonl` of the run folder: one `[start, end, work]` per
line. `start` and `end` are in seconds of the run by the clock that all processes of a host share; `work` is the
processor time of the role's process at `end`. Roles on other hosts have no run folder and record nothing.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from echelon.disk import AppendFile, read_regular

TIMELINE = "timeline"
MAX_BYTES = 1 << 28
Span = tuple[float, float]  # start and end, in seconds of the run


class Timeline:
    """The file of the role `name`. A restarted role continues the file of its predecessor."""

    def __init__(self, run_dir: Path, name: str, started_at: float) -> None:
        folder = run_dir / TIMELINE
        folder.mkdir(exist_ok=True)
        self._file, self._started_at = AppendFile(folder / f"{name}.jsonl", is_new=False), started_at

    def add(self, start: float, end: float) -> None:
        """Appends a trajectory or batch; `start` and `end` are values of `time.perf_counter`.

        That is the monotonic clock of `started_at` on Linux.
        """
        line = [start - self._started_at, end - self._started_at, time.process_time()]
        self._file.append(json.dumps([round(value, 6) for value in line]).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def read_timelines(run_dir: Path) -> dict[str, list[Span]]:
    """Returns the spans of every role that recorded any, in the order of their names."""
    return {name: [(start, end) for start, end, _ in lines] for name, lines in _read(run_dir).items()}


def read_work(run_dir: Path) -> dict[str, list[float]]:
    """Returns the processor time of every role at the end of each of its spans, in seconds since its process began."""
    return {name: [work for _, _, work in lines] for name, lines in _read(run_dir).items()}


def _read(run_dir: Path) -> dict[str, list[list[float]]]:
    found = {path.stem: read_regular(path, MAX_BYTES) for path in sorted((run_dir / TIMELINE).glob("*.jsonl"))}
    return {name: [json.loads(line) for line in text.splitlines()] for name, text in found.items() if text}
