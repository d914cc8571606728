"""The log of a run by episodes: a line every `run.log_interval` episodes, a file of them, and a picture.

A line has the number of the episode, counted from 0, and the means over the last 100 episodes; losses and action values
are means over the updates during these episodes. The columns are those of the PyTorch tutorial on Super Mario Bros;
presets that have no epsilon or no action values leave these out.
"""

from __future__ import annotations

import collections
import contextlib
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from echelon.config import TrainConfig
from echelon.disk import AppendFile, put_file, read_regular
from echelon.names import short_name

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
    epsilon: float = field(default=0.0, kw_only=True)
    mean_reward: float
    mean_length: float
    mean_loss: float
    mean_q_value: float = field(default=0.0, kw_only=True)
    time_delta: float  # seconds since the line before
    time: str

    def text(self, names: Sequence[str]) -> str:
        return " - ".join(f"{TITLES[name]} {getattr(self, name)}" for name in names)

    def record(self, names: Sequence[str]) -> str:
        return "".join(_column(getattr(self, name), WIDTHS[name]) for name in names) + "\n"

    @classmethod
    def parse(cls, record: str, names: Sequence[str]) -> LogLine | None:
        """Returns the line of a record with these columns; None if it is not one."""
        try:
            words = dict(zip(names, record.split(), strict=True))
            return cls(**{name: TYPES.get(name, float)(word) for name, word in words.items()})
        except (ValueError, TypeError):
            return None


NAMES = tuple(field.name for field in fields(LogLine))
TITLES = {name: name.replace("_", " ").title() for name in NAMES}
WIDTHS = dict(zip(NAMES, (8, 8, 10, 15, 15, 15, 15, 15, 20), strict=True))
TYPES: dict[str, type] = {"episode": int, "step": int, "time": str}
EPSILON, Q_VALUE = "epsilon", "mean_q_value"


def names_for(config: TrainConfig) -> tuple[str, ...]:
    """Returns the columns of the log of a run: without epsilon and action values, if its algorithm has none."""
    has = {EPSILON: config.algorithm.distribution == "greedy", Q_VALUE: config.experience == "replay"}
    return tuple(name for name in NAMES if has.get(name, True))


def _column(value: int | float | str, width: int) -> str:
    """Returns a value as a column of this width, at least one space before it."""
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return f" {text:>{width - 1}}"


def _header(names: Sequence[str]) -> str:
    return "".join(_column(TITLES[name].replace(" ", ""), WIDTHS[name]) for name in names) + "\n"


@dataclass(frozen=True, slots=True)
class Learned:
    """What was learned between two rows of metrics."""

    episodes: int  # that had ended by then
    updates: int  # since the row before
    loss: float
    value: float


class EpisodeLog:
    """Turns rows of metrics into lines of the log."""

    def __init__(self, run_dir: Path, config: TrainConfig, past: Mapping[str, Any]) -> None:
        """`past` is the row of metrics at which a resumed run continues; {} for a new run."""
        self.run_dir, self.interval, self.names = run_dir, config.run.log_interval, names_for(config)
        env = short_name(config.env.id)
        self.title = f"{config.preset} · {env} · seed {config.seed}\nrun {run_dir.resolve().name}"
        self.newest = (past.get("episodes", 0) - 1) // self.interval  # the number of the newest line
        self.updates = past.get("updates", 0)
        self.lines = [line for line in _read(run_dir / LOG) if line.episode < past.get("episodes", 0)]
        self.learned = collections.deque[Learned]()
        self.written_at, self.next_draw = time.monotonic(), 0.0
        records = [line.record(self.names) for line in self.lines]  # without those that a resume repeats
        put_file(run_dir / LOG, "".join([_header(self.names), *records]).encode())
        self.file = AppendFile(run_dir / LOG, is_new=False)

    def note(self, row: Mapping[str, Any]) -> str:
        """Notes a row of metrics; returns the line of the log that is due with it, or ""."""
        episodes = row["episodes"]
        self._learn(row)
        number = (episodes - 1) // self.interval
        if number <= self.newest:
            return ""
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
        self.file.append(line.record(self.names).encode())
        self._draw_if_due(now)
        return line.text(self.names)

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
            put_file(self.run_dir / PICTURE, draw(self.lines, self.names, self.title), durable=False)

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
    header, *records = text.splitlines() or [""]
    by_title = {title.replace(" ", ""): name for name, title in TITLES.items()}
    names = [by_title.get(word, "") for word in header.split()]
    return [line for record in records if (line := LogLine.parse(record, names)) is not None]


def draw(lines: list[LogLine], names: Sequence[str], title: str) -> bytes:
    """Returns a picture of reward, length, loss and, if it is in `names`, Q value over the episodes, as PNG."""
    from matplotlib.figure import Figure  # imported here: it takes half a second

    figure = Figure(figsize=(9, 5.5), dpi=110, layout="constrained")
    episodes = [line.episode for line in lines]
    shown = [name for name in ("mean_reward", "mean_length", "mean_loss", Q_VALUE) if name in names]
    layout: list[Any] = [shown[:2], shown[2:]] if Q_VALUE in names else [[shown[0]] * 2, shown[1:]]
    panels = figure.subplot_mosaic(layout)
    for name, axes in panels.items():
        marker = "o" if len(lines) == 1 else None  # a line with one point is invisible
        axes.plot(episodes, [getattr(line, name) for line in lines], color="#1f5fa8", linewidth=1.4, marker=marker)
        axes.set_title(name.replace("_", " ").replace("q v", "Q v"), fontsize=10)
        axes.set_xlabel("episode")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, linewidth=0.5, alpha=0.3)
    means = f"means of the last {NUM_EPISODES} episodes, {lines[-1].step:,} steps"
    figure.suptitle(f"{title}: {means}", fontsize=10, parse_math=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
