"""The figures and tables of a report of `echelon bench replay`.

A sweep has one figure for each measure, over the values that vary; a single run has one for each unit, over its
measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.bench.chart import Chart, Series, draw_chart
from echelon.bench.page import Page, facts, section, table
from echelon.bench.replay.report import FACTS, SHOWN, Run, amount, read_runs
from echelon.bench.replay.setting import Measure

MEANINGS = {
    "insert": "Items inserted, in chunks, and taken into the tree. Higher is better",
    "sample": "Items drawn by priority, in batches, with their weights. Higher is better",
    "update": "Items given new priorities, in batches. Higher is better",
    "sample+update": "Items drawn and given new priorities. Higher is better",
    "mixed": "Items drawn and given new priorities, with a chunk inserted for every batch. Higher is better",
    "insert by the writers": "Items that all writers together appended",
    "sample+update per processor-second": "Items drawn and given new priorities while writers append. Higher is better",
    "memory per transition": "Resident memory over the number of transitions. Lower is better",
}
UNIT_TITLES = {"items/s": "throughput", "bytes": "memory"}
MILLION = 1e6


def replay_page(report: Mapping[str, Any], path: Path) -> Page:
    """The page of a report that was loaded from `path`."""
    runs = read_runs(report, path)
    setting: dict[str, Any] = found if isinstance(found := report.get("setting"), dict) else {}
    varied = ", ".join(runs[0].varied)
    charts = _over_runs(runs, setting) if len(runs) > 1 else _over_measures(runs[0], setting)
    sections = [_measures(runs), _facts(runs), facts("Setting", setting)]
    sections += [facts(each.capitalize(), report.get(each)) for each in ("hardware", "versions")]
    return Page(
        title=f"Replay benchmark{f' by {varied}' if varied else ''}",
        lead="prioritized replay, full; medians over the rounds.",
        images={name: draw_chart(chart) for name, chart in charts.items()},
        sections=tuple(sections),
    )


def _over_measures(run: Run, setting: Mapping[str, Any]) -> dict[str, Chart]:
    charts = {}
    for unit in dict.fromkeys(measure.unit for measure in run.result.measures):
        measures = [measure for measure in run.result.measures if measure.unit == unit]
        title = UNIT_TITLES.get(unit, unit)
        xs = [_tick(_wrapped(measure.name), measure) for measure in measures]
        note = f"Prioritized replay, full. {'Lower' if unit == 'bytes' else 'Higher'} is better."
        charts[title] = _chart(f"Replay: {title}", note, xs, measures, run, setting)
    return charts


def _over_runs(runs: Sequence[Run], setting: Mapping[str, Any]) -> dict[str, Chart]:
    charts = {}
    for name in dict.fromkeys(measure.name for run in runs for measure in run.result.measures):
        found = [(run, measure) for run in runs for measure in run.result.measures if measure.name == name]
        xs = [_tick(run.label, measure) for run, measure in found]
        note = f"{MEANINGS.get(name, name)}."
        chart = _chart(f"Replay: {name}", note, xs, [measure for _, measure in found], found[0][0], setting)
        charts[name] = chart
    return charts


def _chart(
    title: str, note: str, xs: Sequence[str], measures: Sequence[Measure], run: Run, setting: Mapping[str, Any]
) -> Chart:
    medians = [spread.median for measure in measures for spread in measure.by.values()]
    per, unit = (MILLION, f"million {measures[0].unit}") if max(medians) >= MILLION else (1.0, measures[0].unit)
    shown = SHOWN.get(run.mode, ())
    parts = [f"{name} {amount(setting[name])}" for name in shown if setting.get(name)]
    series = []
    for who in dict.fromkeys(name for measure in measures for name in measure.by):
        values = [measure.by[who].median if who in measure.by else None for measure in measures]
        heights = tuple(None if value is None else value / per for value in values)
        series.append(Series(who, heights, tuple("" if h is None else _text(h) for h in heights)))
    peer = [who for measure in measures if measure.ratio is not None for who in list(measure.by)[1:]]
    parts_of_x = [" / ".join(run.varied), *(f"×: echelon over {who}" for who in peer[:1])]
    x_label = "  ·  ".join(part for part in parts_of_x if part)
    return Chart(title, f"{note}\n{'  ·  '.join(parts)}", x_label, unit, tuple(xs), tuple(series))


def _text(height: float) -> str:
    return f"{height:,.0f}" if height >= 100 else f"{height:.2f}" if height >= 0.1 else f"{height:.2g}"


def _tick(label: str, measure: Measure) -> str:
    """What stands below a group of bars: how we compare with the peer, too."""
    return label if measure.ratio is None else f"{label}\n{measure.ratio:.2f}×"


def _wrapped(name: str) -> str:
    return name.replace(" per ", "\nper ").replace(" by ", "\nby ")


def _measures(runs: Sequence[Run]) -> str:
    varied = list(runs[0].varied)
    body = []
    for run in runs:
        for measure in run.result.measures:
            for who, spread in measure.by.items():
                figures = [f"{value:,.0f}" for value in (spread.median, spread.low, spread.high)]
                is_ours = who == next(iter(measure.by))
                ratio = f"{measure.ratio:.2f}×" if measure.ratio is not None and is_ours else ""
                body.append(
                    [f"{measure.name}, {measure.unit}", *(amount(run.varied[v]) for v in varied), who, *figures, ratio]
                )
    head = ["", *varied, "buffer", "median", "lower quartile", "upper quartile", "ratio"]
    return section("All measurements", table(head, body))


def _facts(runs: Sequence[Run]) -> str:
    names = [name for name in FACTS if any(name in run.result.facts for run in runs)]
    if not names:
        return ""
    varied = list(runs[0].varied)
    body = [
        [*(amount(run.varied[v]) for v in varied), *(amount(run.result.facts.get(name, "")) for name in names)]
        for run in runs
    ]
    return section("Counted once", table([*varied, *(FACTS[name] for name in names)], body))
