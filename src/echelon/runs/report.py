"""Draws the learning curve of a run, and formats durations and figures."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from echelon.disk import put_file
from echelon.errors import ConfigError
from echelon.names import short_name
from echelon.runs.bottleneck import bottleneck
from echelon.runs.folder import RunFolder
from echelon.runs.metrics import METRICS, read_rows

__all__ = ["bottleneck", "draw_curve", "duration", "is_number", "number_text", "ordered_rows", "plain_frame", "points"]

CURVE = "curve.png"
MAX_DRAWN = 1e100  # larger values are drawn there: the differences and squares that matplotlib computes stay finite
_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d9660f", "#8a8f98"
Row = dict[str, Any]


def draw_curve(run_dir: Path) -> Path:
    """Draws return and speed over environment steps to `curve.png`; returns its path."""
    config = RunFolder.open(run_dir).parse_config()
    rows = ordered_rows(read_rows(run_dir))
    train, evaluations = rows["train"], rows["evaluation"]
    if not train and not evaluations:
        raise ConfigError(f"{run_dir / METRICS} has no rows yet. Draw the curve after the first steps of the run.")

    # Imported here: matplotlib takes half a second, and only this function needs it. Figure alone needs no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    title = f"{config.preset} · {short_name(config.env.id)} · seed {config.seed}"
    upper.set_title(title, loc="left", pad=24, fontsize=13, fontweight="bold", parse_math=False)
    subtitle = _subtitle(train or evaluations, config.learner.num_learners)
    upper.annotate(subtitle, (0, 1), (0, 10), "axes fraction", textcoords="offset points", fontsize=9, color=_GREY)
    _draw_returns(upper, train, evaluations, config.stop.until_return)
    _draw_speed(lower, train)

    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    put_file(run_dir / CURVE, picture.getvalue())
    return run_dir / CURVE


def drawn_curve(run_dir: Path) -> str | None:
    """Draws the learning curve; returns its path, or None if it cannot be drawn: this does not fail the run."""
    try:
        return str(draw_curve(run_dir))
    except Exception:  # nothing to draw yet, no matplotlib, a full disk, numbers that matplotlib cannot draw
        return None


def duration(seconds: float) -> str:
    """Returns wall time in a readable form: 42 s, 3 min 05 s, 2 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def number_text(value: float) -> str:
    """Returns a return or another figure in a readable form: 1,234.5, 0.72, -0.052, or 1.7e+308 if it is very long.

    Numbers below 10 have three significant digits, as returns may lie between -1 and 1.
    """
    if 9.995 <= abs(value) < 1e12:
        return f"{value:,.1f}"
    text = f"{value + 0.0:.3g}"  # not -0
    return f"{text}.0" if text.lstrip("-").isdecimal() else text


def ordered_rows(rows: list[Row]) -> dict[str, list[Row]]:
    """Returns the rows by their kind, without those that a resume from an earlier checkpoint repeated.

    "train" and "evaluation" are always among the kinds.
    """
    kept: dict[str, list[Row]] = {"train": [], "evaluation": []}
    for row in rows:
        kind, steps = row.get("kind", "train"), row.get("env_steps")
        if not isinstance(kind, str) or not is_number(steps):
            continue
        if kind == "train" and kept["train"] and steps < kept["train"][-1]["env_steps"]:
            kept = {name: [old for old in olds if old["env_steps"] < steps] for name, olds in kept.items()}
        kept.setdefault(kind, []).append(row)
    return kept


def is_number(value: Any) -> bool:
    """Returns whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def points(rows: list[Row], key: str) -> tuple[list[float], list[float]]:
    """Returns the finite numbers under `key` and their steps, within what an axis can show."""
    found = [(row["env_steps"], row[key]) for row in rows if is_number(row.get(key))]
    return [_drawable(x) for x, _ in found], [_drawable(y) for _, y in found]


def _drawable(value: float) -> float:
    return min(max(value, -MAX_DRAWN), MAX_DRAWN)


def _subtitle(rows: list[Row], num_learners: int = 1) -> str:
    last = rows[-1]
    parts = [f"{last['env_steps']:,} environment steps"]
    if is_number(last.get("wall_s")) and last["wall_s"] > 0:
        parts[0] += f" in {duration(last['wall_s'])}"
    if num_learners > 1:
        parts.append(f"{num_learners} learners")
    returns = points(rows, "return_mean")[1]
    if returns:
        parts.append(f"last return {number_text(returns[-1])}, best {number_text(max(returns))}")
    return "  ·  ".join(parts)


def _draw_returns(axes: Any, train: list[Row], evaluations: list[Row], goal: float | None) -> None:
    steps, returns = points(train, "return_mean")
    if steps:
        marker = "o" if steps[0] == steps[-1] else None  # a line with one point is invisible
        label = "training, mean of last 100 episodes"
        axes.plot(steps, returns, color=_BLUE, linewidth=1.6, marker=marker, label=label)
    steps, returns = points(evaluations, "return_mean")
    if steps:
        axes.plot(steps, returns, "o", color=_ORANGE, markersize=5, zorder=3, label="evaluation")
    if axes.lines:
        if goal is not None:
            axes.axhline(goal, color=_GREY, linewidth=1, linestyle="--", label=f"goal {number_text(goal)}")
        axes.legend(frameon=False, loc="best", fontsize=9)
    else:
        axes.text(0.5, 0.5, "no episode ended", transform=axes.transAxes, ha="center", color=_GREY)
    axes.set_ylabel("return")
    plain_frame(axes)


def _draw_speed(axes: Any, train: list[Row]) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    steps, speeds = points(train, "env_steps_per_s")
    axes.fill_between(steps, speeds, color=_GREY, alpha=0.35, linewidth=0)
    axes.plot(steps, speeds, color=_GREY, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("steps/s")
    axes.set_xlabel("environment steps")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_locator(MaxNLocator(2))
    plain_frame(axes)


def plain_frame(axes: Any) -> None:
    """Draws axes with a light grid, and without the lines at the top and at the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, linewidth=0.5, alpha=0.3)
    axes.margins(x=0.01)
