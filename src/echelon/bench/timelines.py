"""Timelines of runs as PNG: one panel per run, one line per role, on one time axis."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.bench.figures import COLORS, GREY

LEARNER = "learner"
KINDS = {"rollout of an actor": COLORS[0], "iteration of the learner": COLORS[1]}
BAR_HEIGHT = 0.72


@dataclass(frozen=True, slots=True)
class Panel:
    """The timelines of one run."""

    title: str
    end_s: float
    interval_s: float  # mean time between two iterations, T
    roles: Mapping[str, Sequence[tuple[float, float]]]  # start and end of each rollout or iteration, by role


@dataclass(frozen=True, slots=True)
class Timelines:
    """The content of a figure."""

    title: str
    note: str
    panels: Sequence[Panel]


def draw_timelines(timelines: Timelines) -> bytes:
    """Returns the figure as a PNG."""
    from matplotlib.figure import Figure  # imported here, as it takes half a second; Figure alone needs no display
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch

    panels = timelines.panels
    heights = [len(panel.roles) + 1 for panel in panels]
    size = (10.0, 1.3 + 0.42 * sum(heights))
    figure = Figure(figsize=size, dpi=120, layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.1))
    figure.suptitle(f"{timelines.title}\n", fontsize=14, fontweight="bold")
    figure.text(0.5, 1 - 0.48 / size[1], timelines.note, ha="center", va="top", fontsize=9, color=GREY)
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel)
    all_axes[-1].set_xlabel("seconds")
    all_axes[-1].set_xlim(0.0, max(panel.end_s for panel in panels))
    patches = [Patch(color=color, label=label) for label, color in KINDS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_panel(axes: Any, panel: Panel) -> None:
    names = [*(name for name in panel.roles if name != LEARNER), LEARNER]
    rollout, iteration = KINDS.values()
    for line, name in enumerate(names):
        bars = [(start, end - start) for start, end in panel.roles.get(name, ())]
        color = iteration if name == LEARNER else rollout
        at = (line - BAR_HEIGHT / 2, BAR_HEIGHT)
        axes.broken_barh(bars, at, facecolors=color, edgecolors="white", linewidth=1.5)
    for start, _ in panel.roles.get(LEARNER, ()):
        axes.axvline(start, color=GREY, linewidth=0.8, linestyle=":", zorder=0)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
