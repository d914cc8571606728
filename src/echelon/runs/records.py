"""Reads what run folders say about their runs, for tables. A folder that is damaged, or of something else, is no error.

A *group* is a folder of runs, as `echelon train --seeds` makes it: GROUP/seed-0, GROUP/seed-1, ...
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.disk import read_json, read_regular
from echelon.errors import ConfigError
from echelon.runs.folder import CONFIG, LOCK, SUMMARY, RunFolder
from echelon.runs.metrics import METRICS, last_rows
from echelon.runs.report import is_number

Row = dict[str, Any]
LOCKS = Path("/proc/locks")
FIGURES = ("env_steps", "return_mean", "evaluation_return", "env_steps_per_s", "wall_s", "progress")
# Statuses that no summary has: a process holds the folder; there is no summary; config.json cannot be read.
RUNNING, CRASHED, DAMAGED = "running", "crashed", "damaged"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run: its configuration and its results so far; None where a figure is not known."""

    path: Path
    status: str  # of its summary (finished, solved, stopped, failed), or one of the above
    config: dict[str, Any] = field(default_factory=dict)
    preset: str = ""
    env: str = ""
    seed: int | None = None
    env_steps: float | None = None
    return_mean: float | None = None
    evaluation_return: float | None = None
    env_steps_per_s: float | None = None
    wall_s: float | None = None
    progress: float | None = None
    goal_reached: bool | None = None  # None without a goal, and until the end
    error: str = ""
    written_at: float = 0.0  # time of its last change, in seconds since the epoch

    @property
    def outcome(self) -> str:
        """The status, and whether a run that reached its end missed its goal."""
        is_missed = self.status == "finished" and self.goal_reached is False
        return f"{self.status} (goal missed)" if is_missed else self.status

    def to_json(self) -> dict[str, Any]:
        """Returns everything except the configuration, as plain JSON values."""
        names = [name for name in self.__slots__ if name not in ("config", "path", "written_at")]
        age_s = max(0.0, time.time() - self.written_at)
        return {"run": str(self.path), **{name: getattr(self, name) for name in names}, "age_s": round(age_s, 1)}


def is_run(path: Path) -> bool:
    """Returns whether `path` is the folder of a run, intact or not."""
    return os.path.isdir(path) and os.path.lexists(path / CONFIG)


def runs_in(folder: Path) -> list[Path]:
    """Returns the run folders in `folder` and in the groups in it, or `folder` itself if it is one; sorted by name.

    Raises ConfigError if `folder` cannot be read.
    """
    if is_run(folder):
        return [folder]
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be listed: {error.strerror}. Give a folder with runs in it.") from error
    found = []
    for entry in entries:
        found += [entry] if is_run(entry) else _runs_of(entry)
    return found


def _runs_of(group: Path) -> list[Path]:
    try:
        return sorted((entry for entry in group.iterdir() if is_run(entry)), key=_by_number)
    except OSError:  # no folder, or not ours
        return []


def _by_number(path: Path) -> tuple[int, str]:
    """Sorts seed-10 after seed-9."""
    number = path.name.rpartition("-")[2]
    return (int(number) if number.isdecimal() else -1, path.name)


def read_run(path: Path) -> RunRecord:
    """Returns the record of the run in `path`."""
    written_at = _written_at(path)
    try:
        config = RunFolder(path).read_config()
    except ConfigError as error:
        return RunRecord(path, DAMAGED, error=str(error), written_at=written_at)
    summary, is_held = _read_summary(path), _is_held(path / LOCK)
    has_ended = bool(summary) and not is_held
    figures = {name: _number(summary, name) for name in FIGURES} if has_ended else _figures_so_far(path)
    status = (_text(summary.get("status")) if has_ended else RUNNING if is_held else "") or CRASHED
    env, seed, goal = config.get("env"), config.get("seed"), summary.get("goal_reached")
    return RunRecord(
        path,
        status,
        config=config,
        preset=_text(config.get("preset")),
        env=_text(env.get("id")) if isinstance(env, dict) else "",
        seed=seed if isinstance(seed, int) else None,
        goal_reached=goal if has_ended and isinstance(goal, bool) else None,
        error=_text(summary.get("error")) if has_ended else "",
        written_at=written_at,
        **figures,
    )


def read_runs(paths: list[Path], progress: Callable[[int, int | None], None] | None = None) -> list[RunRecord]:
    """Returns the records of the runs in `paths`; `progress` is called with (done, total)."""
    records = []
    for index, path in enumerate(paths):
        if progress is not None:
            progress(index, len(paths))
        records.append(read_run(path))
    return records


def _figures_so_far(path: Path) -> dict[str, Any]:
    """Returns the figures of a run without a summary, from its last rows of metrics."""
    rows = last_rows(path)
    last: dict[str, Row] = {"train": {}, "evaluation": {}}
    last |= {str(row.get("kind", "train")): row for row in rows}
    figures: dict[str, Any] = {name: _number(last["train"], name) for name in FIGURES}
    return figures | {"evaluation_return": _number(last["evaluation"], "return_mean")}


def _read_summary(path: Path) -> Row:
    try:
        summary = read_json(path / SUMMARY)
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _number(data: Row, name: str) -> float | None:
    value = data.get(name)
    return value if is_number(value) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _written_at(path: Path) -> float:
    times = [0.0]
    for name in (CONFIG, METRICS, SUMMARY):
        try:
            times.append((path / name).lstat().st_mtime)
        except OSError:
            continue
    return max(times)


def _is_held(lock: Path) -> bool:
    """Returns whether a process holds `lock` (RunFolder.held).

    It reads the kernel's list of locks: trying to take the lock would refuse a run that starts at that moment. Some
    file systems show another device there than in `stat`, so the process number in the file will do instead.
    """
    try:
        status = lock.lstat()
        pid = read_regular(lock, 100).decode(errors="replace")
        lines = LOCKS.read_text().splitlines()
    except OSError:
        return False
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    for line in lines:
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK":
            place, _, inode = words[5].rpartition(":")
            if inode == str(status.st_ino) and (place == device or words[4] == pid):
                return True
    return False
