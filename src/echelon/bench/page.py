"""The page of `echelon bench plot`: one HTML file with everything in it, that loads nothing from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from echelon.bench.sweep import Sweep

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


def page_of(name: str, sweep: Sweep, images: Mapping[str, bytes]) -> str:
    """The report `name` as a page: figures, the table of all percentiles, and what it was measured with."""
    title = f"RPC benchmark by {sweep.x_axis_name}"
    figures = "".join(
        f'<img alt="{escape(metric)} by {escape(sweep.x_axis_name)}" '
        f'src="data:image/png;base64,{base64.b64encode(image).decode()}">\n'
        for metric, image in images.items()
    )
    sections = [_percentiles(sweep), _runs(sweep), _facts("Setting", sweep.arguments)]
    sections += [_facts(each.capitalize(), sweep.extra.get(each)) for each in ("hardware", "versions")]
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
<p>{escape(name)}: an agent answers the requests of observers for actions.</p>
<div class="figures">
{figures}</div>
{"".join(sections)}</body>
</html>
"""


def _percentiles(sweep: Sweep) -> str:
    percentiles = sorted({percentile for rows in sweep.metrics.values() for row in rows for percentile in row})
    body = []
    for metric, rows in sweep.metrics.items():
        unit, per, digits = ("requests/s", 1.0, 0) if "throughput" in metric else ("ms", 1e3, 3)
        for x, row in zip(sweep.xs, rows, strict=True):
            numbers = [f"{row[p] * per:,.{digits}f}" if p in row else "" for p in percentiles]
            body.append([f"{metric}, {unit}", x, *numbers])
    return _section("All percentiles", _table(["", sweep.x_axis_name, *(f"p{p}" for p in percentiles)], body))


def _runs(sweep: Sweep) -> str:
    """What each run did as a whole, where the report says so."""
    runs = sweep.extra.get("runs")
    if not isinstance(runs, list) or len(runs) != len(sweep.xs) or not all(isinstance(run, dict) for run in runs):
        return ""
    columns = {
        "requests_per_s": "requests/s in all",
        "mean_batch": "mean batch",
        "num_observers": "observers",
        "num_requests": "requests",
        "num_rounds": "batches",
        "elapsed_s": "seconds",
    }
    body = [[x, *(_number(run.get(key)) for key in columns)] for x, run in zip(sweep.xs, runs, strict=True)]
    return _section("Whole runs, the warm-up left out", _table([sweep.x_axis_name, *columns.values()], body))


def _facts(title: str, facts: Any) -> str:
    if not isinstance(facts, dict) or not facts:
        return ""
    rows = "".join(
        f"<tr><td>{escape(str(key))}</td><td>{escape(_number(value))}</td></tr>\n"
        for key, value in facts.items()
        if value is not None
    )
    return _section(title, f'<table class="facts">\n{rows}</table>')


def _section(title: str, content: str) -> str:
    return f'<h2>{escape(title)}</h2>\n<div class="wide">{content}</div>\n'


def _table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    titles = "".join(f"<th>{escape(each)}</th>" for each in head)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in row)}</tr>\n" for row in body)
    return f"<table>\n<tr>{titles}</tr>\n{rows}</table>"


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if value >= 100 else f"{value:.3g}"
