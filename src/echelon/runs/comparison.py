"""Compares runs: results, the configuration values that differ, and returns over steps as a picture.

Seeds of one configuration are one *entry*: a row with median and quartiles, a line with a band.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from echelon.disk import put_file
from echelon.errors import ConfigError
from echelon.fields import option_text
from echelon.names import short_name
from echelon.runs.metrics import read_rows
from echelon.runs.records import DAMAGED, RunRecord, is_run, read_run, runs_in
from echelon.runs.report import ordered_rows, plain_frame, points
from echelon.runs.seed_summary import quartiles
from echelon.runs.tables import MISSING, count_text, return_text, text_table, time_text

Curve = tuple[list[float], list[float]]  # steps, returns
COLUMNS = {  # header: name and form of a figure
    "return": ("return_mean", return_text),
    "evaluation": ("evaluation_return", return_text),
    "steps": ("env_steps", count_text),
    "steps/s": ("env_steps_per_s", count_text),
    "time": ("wall_s", time_text),
}
# Fields that differ between seeds of one configuration: where it was stored, and what the run chose for the machine.
OF_A_RUN = ("seed", "shm_dir", "run.dir", "acting.mode", "learner.threads")
NEVER_SHOWN = ("seed", "shm_dir", "run.dir")
FORMATS = (".png", ".svg", ".pdf")
NUM_GRID = 300  # points of a median line
MIN_WIDTH = 0.01  # a shorter line, as a share of the longest in its panel, has a marker: it could not be seen
COLORS = ("#1f5fa8", "#d9660f", "#3c8c5a", "#a03070", "#7a5fb5", "#8c6d31", "#3aa0a8", "#5f6670")


@dataclass(slots=True)
class ComparisonEntry:
    """One run, or several seeds of one configuration."""

    label: str
    runs: list[RunRecord]

    @property
    def env(self) -> str:
        return short_name(self.runs[0].env)

    @property
    def title(self) -> str:
        return self.label if len(self.runs) == 1 else f"{self.label} ({len(self.runs)} seeds)"


def find_entries(paths: Sequence[Path]) -> list[ComparisonEntry]:
    """Returns the entries for run folders and groups; raises ConfigError for a folder that is neither.

    A group is one entry if its runs have one configuration. Runs that are given by themselves are one entry if they
    have one configuration and different seeds.
    """
    entries: list[ComparisonEntry] = []
    single: dict[str, list[RunRecord]] = {}
    for path in paths:
        records = [read_run(run) for run in _runs_at(path)]
        if broken := next((record for record in records if record.status == DAMAGED), None):
            raise ConfigError(broken.error)
        if is_run(path):
            single.setdefault(_key(records[0]), []).append(records[0])
            continue
        parts: dict[str, list[RunRecord]] = {}
        for record in records:
            parts.setdefault(_key(record), []).append(record)
        for index, runs in enumerate(parts.values(), 1):
            entries.append(ComparisonEntry(_name(path) if len(parts) == 1 else f"{_name(path)} #{index}", runs))
    for runs in single.values():
        if len({record.seed for record in runs}) == len(runs):
            entries.append(ComparisonEntry(_name(runs[0].path), runs))
        else:  # repetitions of a seed are compared
            entries += [ComparisonEntry(_name(record.path), [record]) for record in runs]
    labels = [entry.label for entry in entries]
    for entry in entries:
        if labels.count(entry.label) > 1:
            entry.label = os.path.relpath(entry.runs[0].path if len(entry.runs) == 1 else entry.runs[0].path.parent)
    return entries


def _runs_at(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ConfigError(f"there is no run folder {path}. `echelon list` shows the runs in runs/.")
    if not (found := runs_in(path)):
        raise ConfigError(
            f"{path} is neither a run folder nor a folder of runs. `echelon list` shows the runs in runs/."
        )
    return found


def _name(path: Path) -> str:
    return path.resolve().name


def _key(record: RunRecord) -> str:
    """Returns the configuration as text, without what differs between seeds."""
    flat = flatten(record.config)
    return json.dumps({path: value for path, value in flat.items() if path not in OF_A_RUN}, sort_keys=True)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of a configuration by their paths; keyword arguments of the environment are one value."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and path != "env.kwargs":
            flat |= flatten(value, f"{path}.")
        else:
            flat[path] = value
    return flat


def result_table(entries: Sequence[ComparisonEntry]) -> list[str]:
    """Returns the lines of a table of results: figures of a run, or medians (first to third quartile) over seeds."""
    rows = []
    for entry in entries:
        statuses = list(dict.fromkeys(record.outcome for record in entry.runs))
        cells = [
            _spread_text([getattr(record, name) for record in entry.runs], show) for name, show in COLUMNS.values()
        ]
        rows.append([entry.title, ", ".join(statuses), *cells])
    return text_table(("run", "status", *COLUMNS), rows, left=("run", "status"))


def _spread_text(values: Sequence[float | None], show: Callable[[float | None], str]) -> str:
    found = quartiles(values)
    if found is None:
        return MISSING
    low, middle, high = map(show, found)
    return middle if low == high else f"{middle} ({low} to {high})"


def difference_table(entries: Sequence[ComparisonEntry]) -> list[str]:
    """Returns the lines of a table of the fields whose values differ between the entries; [] if none do.

    A row per field, a column per entry; several values of one entry are listed.
    """
    flats = [[flatten(record.config) for record in entry.runs] for entry in entries]
    paths = list(dict.fromkeys(path for runs in flats for flat in runs for path in flat))
    rows = []
    for path in paths:
        cells = [", ".join(dict.fromkeys(_value_text(flat, path) for flat in runs)) for runs in flats]
        if path not in NEVER_SHOWN and len(set(cells)) > 1:
            rows.append([path, *cells])
    header = ["field", *(f"[{index}]" for index in range(1, len(entries) + 1))]
    if not rows:
        return []
    legend = [f"[{index}] {entry.title}" for index, entry in enumerate(entries, 1)]
    return [*legend, "", *text_table(header, rows, left=header)]


def _value_text(flat: Mapping[str, Any], path: str) -> str:
    return option_text(flat[path]) if path in flat else MISSING


def read_curves(entries: Sequence[ComparisonEntry], progress: Callable[[int, int | None], None]) -> list[list[Curve]]:
    """Returns the returns over steps of every run, by entry; a run without an episode has an empty curve."""
    total, done = sum(len(entry.runs) for entry in entries), 0
    curves: list[list[Curve]] = []
    for entry in entries:
        curves.append([])
        for record in entry.runs:
            progress(done, total)
            curves[-1].append(points(ordered_rows(read_rows(record.path))["train"], "return_mean"))
            done += 1
    return curves


def draw_comparison(entries: Sequence[ComparisonEntry], curves: Sequence[Sequence[Curve]], path: Path) -> None:
    """Draws returns over steps to `path`, a panel per environment: a line per run, or the median and band of seeds.

    The median is drawn over the steps that all seeds have: beyond them it would be that of fewer seeds. Thin lines show
    every seed to its end.
    """
    from matplotlib.figure import Figure  # imported here, as it takes half a second; Figure alone needs no display

    panels: dict[str, list[int]] = {}  # by environment: the entries, by their index
    for index, entry in enumerate(entries):
        panels.setdefault(entry.env, []).append(index)
    num_columns = min(len(panels), 2)
    num_rows = -(-len(panels) // num_columns)
    size = (9.0, 4.6) if len(panels) == 1 else (6.0 * num_columns, 3.8 * num_rows)
    figure = Figure(figsize=(size[0], size[1] + 0.2 * len(entries)), dpi=120, layout="constrained")
    for place, (env, indices) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(num_rows, num_columns, place)
        widest = max((curve[0][-1] for index in indices for curve in curves[index] if curve[0]), default=0.0)
        for index in indices:
            _draw_entry(axes, entries[index], index, [curve for curve in curves[index] if curve[0]], widest)
        has_band = any(len(entries[index].runs) > 1 for index in indices)
        note = ": median and interquartile range over seeds" if has_band else ""
        _label(axes, f"{env}{note}", size=12 if len(panels) == 1 else 10)
    if any(axes.get_legend_handles_labels()[0] for axes in figure.axes):
        figure.legend(loc="outside lower left", frameon=False, fontsize=9)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    try:
        put_file(path, picture.getvalue())
    except OSError as error:
        raise ConfigError(f"the picture {path} cannot be written: {error}. Choose another file with -o.") from error


def _draw_entry(axes: Any, entry: ComparisonEntry, index: int, curves: Sequence[Curve], widest: float) -> None:
    """Draws the curves of an entry. One that is too short to see, of `widest` steps in its panel, ends in a marker."""
    color, style = COLORS[index % len(COLORS)], "-" if index < len(COLORS) else "--"
    grid = common_grid(curves) if len(curves) > 1 else None
    look = {"linewidth": 1.8, "linestyle": style} if grid is None else {"linewidth": 0.7, "alpha": 0.3, "zorder": 1}
    for number, (steps, returns) in enumerate(curves):
        marker = "o" if steps[-1] - steps[0] <= MIN_WIDTH * widest else None
        label = entry.title if grid is None and number == 0 else None
        axes.plot(steps, returns, color=color, marker=marker, markevery=[-1], label=label, **look)
    if grid is not None:
        values = np.array([np.interp(grid, *curve) for curve in curves])
        low, middle, high = np.percentile(values, [25, 50, 75], axis=0)
        axes.fill_between(grid, low, high, color=color, alpha=0.2, linewidth=0, zorder=2)
        axes.plot(grid, middle, color=color, linestyle=style, linewidth=2.0, label=entry.title, zorder=3)


def _label(axes: Any, title: str, size: int) -> None:
    from matplotlib.ticker import EngFormatter

    if not axes.lines:
        axes.text(0.5, 0.5, "no episode ended", transform=axes.transAxes, ha="center", color=COLORS[-1])
        axes.set(xticks=[], yticks=[])
    axes.set_title(title, loc="left", fontsize=size, fontweight="bold", parse_math=False)
    axes.set_xlabel("environment steps")
    axes.set_ylabel("return, mean of last 100 episodes")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    plain_frame(axes)


def common_grid(curves: Sequence[Curve]) -> np.ndarray[Any, Any] | None:
    """Returns steps over the part that all curves have; None if they have no part in common."""
    if not curves:
        return None
    begin, end = max(curve[0][0] for curve in curves), min(curve[0][-1] for curve in curves)
    return np.linspace(begin, end, NUM_GRID) if begin < end else None
