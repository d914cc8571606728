"""`echelon bench plot`: the report of a sweep as four figures and one page."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.bench.page import page_of
from echelon.bench.sweep import DRAWN, METRICS, Sweep, read_sweep
from echelon.errors import ConfigError

X_TEXTS = {
    "world_size": "processes: a coordinator, an agent, and the rest observers",
    "batch": "whether the agent answers all observers together",
    "state_size": "dimensions of a state",
    "nlayers": "hidden layers of the policy",
    "out_features": "actions, and width of the layers",
    "transport": "what carries the requests",
    "device": "where the policy is computed",
    "steps": "requests of an observer in one episode",
    "episodes": "episodes of each observer",
    "max_wait_us": "how long a batch waits for an observer, µs",
}
MEANINGS = {
    "agent throughput": "Requests of a batch / agent latency. Higher is better",
    "observer throughput": "1 / observer latency, for one observer. Higher is better",
    "agent latency": "From a batch's first request to its actions. Lower is better",
    "observer latency": "From one observer's request to its action. Lower is better",
}
LOG_RATIO = 20.0  # from here on the small bars of a linear axis cannot be read
COLORS = ("#1f5fa8", "#e08a2e")
GREY = "#5f6670"


def draw_report(path: Path, output_dir: Path | None = None) -> list[Path]:
    """Draws the report at `path` into four PNG files and an HTML page, in `output_dir` or beside it; returns them."""
    sweep = read_sweep(path)
    folder = output_dir or path.absolute().parent
    images = {metric: draw(sweep, metric) for metric in METRICS}
    files = {folder / f"{path.stem}-{metric.replace(' ', '-')}.png": image for metric, image in images.items()}
    files[folder / f"{path.stem}.html"] = page_of(path.name, sweep, images).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            file.write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f"the figures cannot be written to {folder}: {error.strerror}. Name another folder with --output-dir."
        ) from error
    return list(files)


@dataclass(frozen=True, slots=True)
class Unit:
    """What a figure counts in."""

    name: str
    per: float  # units in a second, or in a request per second

    def text(self, value: float) -> str:
        """`value` (in seconds or requests per second) as a label: three digits, or all before the point."""
        scaled = value * self.per
        if scaled == 0 or abs(scaled) >= 99.95:
            return f"{scaled:,.0f}"
        return f"{scaled:.3g}"


def unit_of(metric: str, values: Sequence[float]) -> Unit:
    """The unit in which the largest of `values` reads well."""
    if "throughput" in metric:
        return Unit("requests/s", 1.0)
    largest = max(values)
    return Unit("s", 1.0) if largest >= 10.0 else Unit("ms", 1e3) if largest >= 1e-3 else Unit("µs", 1e6)


def draw(sweep: Sweep, metric: str) -> bytes:
    """One metric as a PNG: the bars of two percentiles for each x."""
    from matplotlib.figure import Figure  # takes half a second to import; Figure alone needs no display
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = sweep.metrics[metric]
    values = [row[percentile] for row in rows for percentile in DRAWN]
    unit = unit_of(metric, values)
    width = min(16.0, max(7.5, 2.0 + 1.3 * len(rows)))
    figure = Figure(figsize=(width, 4.8), dpi=120, layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1))
    axes = figure.subplots()
    axes.set_title(f"RPC benchmark: {metric}", fontsize=14, fontweight="bold", pad=38)
    below: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "bottom", "fontsize": 9, "color": GREY}
    axes.text(0.5, 1.02, f"{MEANINGS[metric]}.\n{common(sweep)}", **below)
    bars = [
        axes.bar(
            [x + side * 0.2 for x in range(len(rows))],
            [row[percentile] * unit.per for row in rows],
            width=0.38,
            color=color,
            label=_legend(metric, percentile),
        )
        for percentile, side, color in zip(DRAWN, (-1, 1), COLORS, strict=True)
    ]
    for percentile, container in zip(DRAWN, bars, strict=True):
        texts = [unit.text(row[percentile]) for row in rows]
        axes.bar_label(container, texts, padding=2, fontsize=9 if len(rows) <= 10 else 7)
    _frame(axes, sweep, f"{metric}, {unit.name}", log=_needs_log(values))
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def common(sweep: Sweep) -> str:
    """What all runs had in common, for people."""
    names = ("transport", "world_size", "batch", "state_size", "nlayers", "out_features", "device")
    parts = [f"{name} {sweep.arguments[name]}" for name in names if name in sweep.arguments]
    return "  ·  ".join(parts)


def _legend(metric: str, percentile: int) -> str:
    if percentile == 50:
        return "p50: the median"
    what = "batches" if "agent" in metric else "requests"
    return f"p{percentile}: {100 - percentile} % of {what} {'were faster' if 'throughput' in metric else 'took longer'}"


def _needs_log(values: Sequence[float]) -> bool:
    return min(values) > 0.0 and max(values) > LOG_RATIO * min(values)


def _frame(axes: Any, sweep: Sweep, label: str, *, log: bool) -> None:
    from matplotlib.ticker import FuncFormatter

    if log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.set_ylim(10 ** math.floor(math.log10(low)), high * 1.5)
        label += "  (log scale)"
    else:
        axes.margins(y=0.12)
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set_ylabel(label)
    text = X_TEXTS.get(sweep.x_axis_name)
    axes.set_xlabel(f"{sweep.x_axis_name}{f'  ({text})' if text else ''}")
    crowded = sum(len(x) for x in sweep.xs) > 90
    axes.set_xticks(range(len(sweep.xs)), sweep.xs, rotation=30 if crowded else 0, ha="right" if crowded else "center")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="y", linewidth=0.5, alpha=0.35)
    axes.set_axisbelow(True)
