"""Bar charts as PNG, and one self-contained HTML page with all charts and tables."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from echelon.bench.harness import amount

if TYPE_CHECKING:
    from echelon.bench.timelines import Timelines

LOG_RATIO = 20.0  # above this ratio small bars on a linear axis are unreadable
COLORS = ("#1f5fa8", "#e08a2e", "#4f9a68")
GREY = "#5f6670"
GROUP_WIDTH = 0.78  # width of all bars of one group
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff; max-width: 1180px; margin: 2rem auto;
       padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin-top: 2rem }
p { color: #5f6670; margin-top: .3rem }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr)); gap: 1rem }
img { width: 100%; height: auto; border: 1px solid #e3e6ea; border-radius: 6px }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #e3e6ea; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
th { font-weight: 600; background: #f6f7f9 }
.facts td { text-align: left; white-space: normal }
"""


@dataclass(frozen=True, slots=True)
class Series:
    """Bars of one color, one per group; None where a bar is missing."""

    label: str
    heights: tuple[float | None, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """The content of a figure."""

    title: str
    note: str  # below the title: what is measured, with which arguments
    x_label: str
    y_label: str
    xs: tuple[str, ...]
    series: tuple[Series, ...]


def draw_chart(chart: Chart) -> bytes:
    """Returns the chart as a PNG."""
    from matplotlib.figure import Figure  # imported here, as it takes half a second; Figure alone needs no display
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    width = min(16.0, max(7.5, 2.0 + 0.65 * len(chart.xs) * len(chart.series)))
    figure = Figure(figsize=(width, 4.8), dpi=120, layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1))
    axes = figure.subplots()
    num_lines = 1 + chart.note.count("\n")
    axes.set_title(chart.title, fontsize=14, fontweight="bold", pad=10 + 14 * num_lines)
    below: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "bottom", "fontsize": 9, "color": GREY}
    axes.text(0.5, 1.02, chart.note, **below)
    share = GROUP_WIDTH / len(chart.series)
    for index, (series, color) in enumerate(zip(chart.series, COLORS, strict=False)):
        there = [place for place, height in enumerate(series.heights) if height is not None]
        offset = (index - (len(chart.series) - 1) / 2) * share
        heights = [height for height in series.heights if height is not None]
        bars = axes.bar(
            [place + offset for place in there], heights, width=0.95 * share, color=color, label=series.label
        )
        texts = [series.texts[place] for place in there]
        axes.bar_label(bars, texts, padding=2, fontsize=9 if len(chart.xs) <= 10 else 7)
    _frame(axes, chart)
    figure.legend(loc="outside lower center", ncols=len(chart.series), frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _needs_log(values: Sequence[float]) -> bool:
    return min(values) > 0.0 and max(values) > LOG_RATIO * min(values)


def _frame(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter

    label = chart.y_label
    if _needs_log([height for series in chart.series for height in series.heights if height is not None]):
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.set_ylim(10 ** math.floor(math.log10(low)), high * 1.5)
        label += "  (log scale)"
    else:
        axes.margins(y=0.12)
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set_ylabel(label)
    axes.set_xlabel(chart.x_label)
    axes.set_xlim(-0.6, len(chart.xs) - 0.4)
    crowded = sum(len(x) for x in chart.xs) > 90
    axes.set_xticks(range(len(chart.xs)), chart.xs, rotation=30 if crowded else 0, ha="right" if crowded else "center")
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="y", linewidth=0.5, alpha=0.35)
    axes.set_axisbelow(True)


@dataclass(frozen=True, slots=True)
class Page:
    """The content of a page: charts and timelines by name, and tables as HTML."""

    title: str
    lead: str
    charts: Mapping[str, Chart]
    sections: Sequence[str]
    timelines: Mapping[str, Timelines] = field(default_factory=dict)


def page_html(page: Page, name: str, images: Mapping[str, bytes]) -> str:
    """Returns the HTML page of the report `name`, with the charts as `images`."""
    title = page.title
    figures = "".join(
        f'<img alt="{escape(what)}: {escape(title)}" src="data:image/png;base64,{base64.b64encode(image).decode()}">\n'
        for what, image in images.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}: {escape(name)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>{escape(name)}: {escape(page.lead)}</p>
<div class="figures">
{figures}</div>
{"".join(page.sections)}</body>
</html>
"""


def facts(title: str, values: Any) -> str:
    """Returns a table of names and values; "" if there are none."""
    if not isinstance(values, dict) or not values:
        return ""
    rows = "".join(
        f"<tr><td>{escape(str(key))}</td><td>{escape(amount(value))}</td></tr>\n"
        for key, value in values.items()
        if value is not None
    )
    return section(title, f'<table class="facts">\n{rows}</table>')


def section(title: str, content: str) -> str:
    return f'<h2>{escape(title)}</h2>\n<div class="wide">{content}</div>\n'


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    titles = "".join(f"<th>{escape(each)}</th>" for each in head)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in row)}</tr>\n" for row in body)
    return f"<table>\n<tr>{titles}</tr>\n{rows}</table>"
