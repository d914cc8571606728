"""The log of a run by episodes: a line every `run.log_interval` episodes, a file of them, and a picture.

A line has the number of the episode, counted from 0, and the means over the last 100 episodes; losses and action values
are means over the updates during these episodes. The columns are those of the PyTorch tutorial on Super Mario Bros.
"""

from __future__ import annotations

import collections
import contextlib
import io
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from echelon.disk import AppendFile, put_file, read_regular

LOG, PICTURE = "episodes.log", "episodes.png"
MAX_BYTES = 1 << 26  # of the file, to be read as a whole
NUM_EPISODES = 100  # over which the means are taken
MIN_DRAW_S, DRAW_SHARE = 20.0, 0.01  # the picture is drawn at most so often, and takes at most this share of the time
LOSSES, VALUES = ("loss.total", "loss.critic"), ("q_mean",)  # names in the rows of metrics, the first that exists


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of the log."""

    episode: int
    step: int
    epsilon: float
    mean_reward: float
    mean_length: float
    mean_loss: float
    mean_q_value: float
    time_delta: float  # seconds since the line before
    time: str

    def text(self) -> str:
        return " - ".join(f"{name} {value}" for name, value in zip(TITLES, astuple(self), strict=True))

    def record(self) -> str:
        return "".join(map(_column, astuple(self), WIDTHS)) + "\n"

    @classmethod
    def parse(cls, record: str) -> LogLine | None:
        """Returns the line of a record; None if it is not one."""
        try:
            episode, step, *numbers, when = record.split()
            epsilon, reward, length, loss, value, delta = map(float, numbers)
            return cls(int(episode), int(step), epsilon, reward, length, loss, value, delta, when)
        except ValueError:
            return None


TITLES = [field.name.replace("_", " ").title() for field in fields(LogLine)]
WIDTHS = (8, 8, 10, 15, 15, 15, 15, 15, 20)


def _column(value: int | float | str, width: int) -> str:
    """Returns a value as a column of this width, at least one space before it."""
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return f" {text:>{width - 1}}"


HEADER = "".join(map(_column, (title.replace(" ", "") for title in TITLES), WIDTHS)) + "\n"


@dataclass(frozen=True, slots=True)
class Learned:
    """What was learned between two rows of metrics."""

    episodes: int  # that had ended by then
    updates: int  # since the row before
    loss: float
    value: float


class EpisodeLog:
    """Turns rows of metrics into lines of the log."""

    def __init__(self, run_dir: Path, interval: int, past: Mapping[str, Any]) -> None:
        """`past` is the row of metrics at which a resumed run continues; {} for a new run."""
        self.run_dir, self.interval = run_dir, interval
        self.newest = (past.get("episodes", 0) - 1) // interval  # the number of the newest line
        self.updates = past.get("updates", 0)
        self.lines = [line for line in _read(run_dir / LOG) if line.episode < past.get("episodes", 0)]
        self.learned = collections.deque[Learned]()
        self.written_at, self.next_draw = time.monotonic(), 0.0
        records = "".join([HEADER, *(line.record() for line in self.lines)])  # without those that a resume repeats
        put_file(run_dir / LOG, records.encode())
        self.file = AppendFile(run_dir / LOG, is_new=False)

    def note(self, row: Mapping[str, Any]) -> LogLine | None:
        """Notes a row of metrics; returns the line of the log that is due with it."""
        episodes = row["episodes"]
        self._learn(row)
        number = (episodes - 1) // self.interval
        if number <= self.newest:
            return None
        self.newest, now = number, time.monotonic()
        line = LogLine(
            episode=episodes - 1,
            step=row["env_steps"],
            epsilon=row.get("epsilon", 0.0),
            mean_reward=round(row["return_mean"] or 0.0, 3),
            mean_length=round(row["length_mean"] or 0.0, 3),
            mean_loss=self._mean("loss"),
            mean_q_value=self._mean("value"),
            time_delta=round(now - self.written_at, 3),
            time=datetime.now().isoformat(timespec="seconds"),
        )
        self.written_at = now
        self.lines.append(line)
        self.file.append(line.record().encode())
        self._draw_if_due(now)
        return line

    def _learn(self, row: Mapping[str, Any]) -> None:
        episodes, updates = row["episodes"], row["updates"] - self.updates
        self.updates = row["updates"]
        if updates > 0:
            loss, value = (next((row[name] for name in names if name in row), 0.0) for names in (LOSSES, VALUES))
            self.learned.append(Learned(episodes, updates, loss, value))
        while self.learned and self.learned[0].episodes <= episodes - NUM_EPISODES:
            self.learned.popleft()

    def _mean(self, name: str) -> float:
        updates = sum(learned.updates for learned in self.learned)
        total = sum(learned.updates * getattr(learned, name) for learned in self.learned)
        return round(total / updates, 3) if updates else 0.0

    def _draw_if_due(self, now: float) -> None:
        if now >= self.next_draw:
            self._draw()
            took_s = time.monotonic() - now
            self.next_draw = now + max(MIN_DRAW_S, took_s / DRAW_SHARE)

    def _draw(self) -> None:
        with contextlib.suppress(
            ImportError, OSError
        ):  # no matplotlib, a full disk: the run goes on without the picture
            put_file(self.run_dir / PICTURE, draw(self.lines), durable=False)

    def close(self) -> None:
        if self.lines:
            self._draw()
        self.file.close()


def _read(path: Path) -> list[LogLine]:
    """Returns the lines of a log, without what is not one; none if there is no log."""
    try:
        text = read_regular(path, MAX_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return [line for record in text.splitlines() if (line := LogLine.parse(record)) is not None]


def draw(lines: list[LogLine]) -> bytes:
    """Returns a picture of reward, length, loss and Q value over the episodes, as PNG."""
    from matplotlib.figure import Figure  # imported here: it takes half a second

    figure = Figure(figsize=(9, 5.5), dpi=110, layout="constrained")
    episodes = [line.episode for line in lines]
    panels = figure.subplots(2, 2, sharex=True)
    for axes, name in zip(panels.flat, ("mean_reward", "mean_length", "mean_loss", "mean_q_value"), strict=True):
        marker = "o" if len(lines) == 1 else None  # a line with one point is invisible
        axes.plot(episodes, [getattr(line, name) for line in lines], color="#1f5fa8", linewidth=1.4, marker=marker)
        axes.set_title(name.replace("_", " ").replace("q v", "Q v"), fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, linewidth=0.5, alpha=0.3)
    for axes in panels[1]:
        axes.set_xlabel("episode")
    figure.suptitle(f"means of the last {NUM_EPISODES} episodes, {lines[-1].step:,} steps", fontsize=9, color="#8a8f98")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
