"""The figures and tables of a sweep of `echelon bench rpc`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.bench.chart import Chart, Series, draw_chart
from echelon.bench.page import Page, facts, number, section, table
from echelon.bench.sweep import DRAWN, METRICS, Sweep

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


def rpc_page(sweep: Sweep) -> Page:
    """Four figures, the table of all percentiles, and what it was measured with."""
    sections = [_percentiles(sweep), _runs(sweep), facts("Setting", sweep.arguments)]
    sections += [facts(each.capitalize(), sweep.extra.get(each)) for each in ("hardware", "versions")]
    return Page(
        title=f"RPC benchmark by {sweep.x_axis_name}",
        lead="an agent answers the requests of observers for actions.",
        images={metric: draw(sweep, metric) for metric in METRICS},
        sections=tuple(sections),
    )


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
    rows = sweep.metrics[metric]
    unit = unit_of(metric, [row[percentile] for row in rows for percentile in DRAWN])
    series = tuple(
        Series(
            _legend(metric, percentile),
            tuple(row[percentile] * unit.per for row in rows),
            tuple(unit.text(row[percentile]) for row in rows),
        )
        for percentile in DRAWN
    )
    text = X_TEXTS.get(sweep.x_axis_name)
    chart = Chart(
        title=f"RPC benchmark: {metric}",
        note=f"{MEANINGS[metric]}.\n{common(sweep)}",
        x_label=f"{sweep.x_axis_name}{f'  ({text})' if text else ''}",
        y_label=f"{metric}, {unit.name}",
        xs=sweep.xs,
        series=series,
    )
    return draw_chart(chart)


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


def _percentiles(sweep: Sweep) -> str:
    percentiles = sorted({percentile for rows in sweep.metrics.values() for row in rows for percentile in row})
    body = []
    for metric, rows in sweep.metrics.items():
        unit, per, digits = ("requests/s", 1.0, 0) if "throughput" in metric else ("ms", 1e3, 3)
        for x, row in zip(sweep.xs, rows, strict=True):
            numbers = [f"{row[p] * per:,.{digits}f}" if p in row else "" for p in percentiles]
            body.append([f"{metric}, {unit}", x, *numbers])
    return section("All percentiles", table(["", sweep.x_axis_name, *(f"p{p}" for p in percentiles)], body))


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
    body = [[x, *(number(run.get(key)) for key in columns)] for x, run in zip(sweep.xs, runs, strict=True)]
    return section("Whole runs, the warm-up left out", table([sweep.x_axis_name, *columns.values()], body))
