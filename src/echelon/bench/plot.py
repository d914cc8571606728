"""`echelon bench plot`: draws a report of `echelon bench rpc`, `replay` or `async` as figures and one page.

It also reads reports of PyTorch's RPC benchmark: percentiles are named "50" or "p50", and the name of a latency may
include its unit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from echelon.bench.async_page import async_page
from echelon.bench.figures import Chart, Page, Series, draw_chart, facts, page_html, section, table
from echelon.bench.harness import Figure, Measure, amount
from echelon.bench.replay import FACTS, SHOWN
from echelon.bench.timelines import draw_timelines
from echelon.errors import ConfigError

METRICS = {
    "agent throughput": "Requests of a batch / agent latency. Higher is better",
    "observer throughput": "1 / observer latency, for one observer. Higher is better",
    "agent latency": "From a batch's first request to its actions. Lower is better",
    "observer latency": "From one observer's request to its action. Lower is better",
}
DRAWN = (50, 95)  # percentiles; the table of the page has all
X_TEXTS = {
    "world_size": "processes: a coordinator, an agent, and the rest observers",
    "batch": "whether the agent serves all observers in one batch",
    "state_size": "dimensions of a state",
    "nlayers": "hidden layers of the policy",
    "out_features": "actions, and width of the layers",
    "transport": "transport of the requests",
    "device": "device of the policy",
    "steps": "requests per observer and episode",
    "episodes": "episodes per observer",
    "max_wait_us": "how long a batch waits for an observer, µs",
}
COMMON = ("transport", "world_size", "batch", "state_size", "nlayers", "out_features", "device")
TOTALS = {
    "requests_per_s": "requests/s in total",
    "mean_batch": "mean batch",
    "num_observers": "observers",
    "num_requests": "requests",
    "num_rounds": "batches",
    "elapsed_s": "seconds",
}
MEASURES = {
    "insert": "Items inserted in chunks, including the update of the sum tree. Higher is better",
    "sample": "Items sampled by priority, in batches, with their weights. Higher is better",
    "update": "Items whose priorities are updated, in batches. Higher is better",
    "sample+update": "Items sampled and updated. Higher is better",
    "mixed": "Items sampled and updated, with one chunk inserted per batch. Higher is better",
    "insert by the writers": "Items appended by all writers together",
    "sample+update per processor-second": "Items sampled and updated while writers append. Higher is better",
    "memory per transition": "Resident memory over the number of transitions. Lower is better",
}
UNIT_TITLES = {"items/s": "throughput", "bytes": "memory"}
MILLION = 1e6


def draw_report(path: Path, output_dir: Path | None = None) -> list[Path]:
    """Draws the report at `path` to PNG files and an HTML page, in `output_dir` or beside it; returns their paths."""
    page = page_of(path)
    folder = output_dir or path.absolute().parent
    images = {name: draw_chart(chart) for name, chart in page.charts.items()}
    images |= {name: draw_timelines(timelines) for name, timelines in page.timelines.items()}
    files = {folder / f"{path.stem}-{_slug(name)}.png": image for name, image in images.items()}
    files[folder / f"{path.stem}.html"] = page_html(page, path.name, images).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            file.write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f"the figures cannot be written to {folder}: {error.strerror}. Choose another folder with --output-dir."
        ) from error
    return list(files)


def _slug(name: str) -> str:
    """Returns a name that can be part of a file name."""
    return re.sub(r"\W+", "-", name.replace("+", " and "))


def page_of(path: Path) -> Page:
    """Returns the page of the report at `path`; raises ConfigError if the report is invalid."""
    report = load_report(path)
    match report.get("bench"):
        case "replay":
            return replay_page(report, path)
        case "async":
            return async_page(report, path, _machine(report))
    return rpc_page(read_sweep(report, path))


def load_report(path: Path) -> dict[str, Any]:
    """Returns the JSON object in the file at `path`, of any benchmark."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except OSError as error:
        raise ConfigError(
            f"report {path} cannot be read: {error.strerror}. `echelon bench rpc --world_size 10,20`, and `echelon "
            "bench replay` and `echelon bench async` with --output FILE, write reports."
        ) from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise ConfigError(f"report {path} is not JSON: {error}. Give the file that a benchmark wrote.") from error
    if not isinstance(report, dict):
        raise ConfigError(
            f"report {path} contains a {type(report).__name__} instead of an object. Give the file that a "
            "benchmark wrote."
        )
    return report


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _machine(report: Mapping[str, Any]) -> list[str]:
    return [facts(each.capitalize(), report.get(each)) for each in ("hardware", "versions")]


# Reports of `rpc`.


@dataclass(frozen=True, slots=True)
class RpcSweep:
    """A report of `rpc`: the percentiles of every metric, for each value of the varied argument."""

    x_axis_name: str
    xs: tuple[str, ...]
    metrics: Mapping[str, tuple[Mapping[int, float], ...]]  # seconds or requests per second, by percentile, per x
    arguments: Mapping[str, Any]  # equal in all runs
    extra: Mapping[str, Any]  # only in Echelon's reports: hardware, versions, runs


def read_sweep(report: Mapping[str, Any], path: Path) -> RpcSweep:
    """Validates the report loaded from `path`."""
    x_axis_name, results = report.get("x_axis_name"), report.get("benchmark_results")
    if not isinstance(results, list) or not results:
        bench = report.get("bench")
        kind = f"a report of `echelon bench {bench}`" if bench else "not a report of `echelon bench rpc`"
        raise ConfigError(
            f"{path} is {kind}: it has no list of `benchmark_results`. `plot` draws reports of `rpc`, `replay` and "
            "`async`: make one with `echelon bench rpc --world_size 10,20 --output_file_path FILE`."
        )
    if not isinstance(x_axis_name, str) or not x_axis_name:
        raise ConfigError(
            f"{path} has no `x_axis_name`: it is the report of a single setting, without an x axis. Give one argument "
            "a list of values, such as `echelon bench rpc --world_size 10,20`, and draw that report."
        )
    where = [f"{path}: benchmark_results[{number}]" for number in range(len(results))]
    for result, place in zip(results, where, strict=True):
        if not isinstance(result, dict) or x_axis_name not in result:
            raise ConfigError(f"{place} has no {x_axis_name!r}, the x axis of the report.")
    extra = report.get("echelon")
    return RpcSweep(
        x_axis_name=x_axis_name,
        xs=tuple(str(result[x_axis_name]) for result in results),
        metrics={metric: tuple(map(_percentiles, results, [metric] * len(where), where)) for metric in METRICS},
        arguments={k: v for k, v in report.items() if k not in ("x_axis_name", "benchmark_results", "echelon")},
        extra=extra if isinstance(extra, dict) else {},
    )


def _percentiles(result: Mapping[str, Any], metric: str, where: str) -> dict[int, float]:
    values = result.get(metric, result.get(f"{metric} (seconds)"))
    if not isinstance(values, dict):
        raise ConfigError(f"{where} has no {metric!r}; a report has {', '.join(METRICS)}.")
    found = {}
    for key, value in values.items():
        percentile = str(key).removeprefix("p")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not percentile.isdecimal() or not number or not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{where} has {key}={value!r} in {metric!r}, which is not a percentile and its number.")
        found[int(percentile)] = float(value)
    missing = [str(percentile) for percentile in DRAWN if percentile not in found]
    if missing:
        raise ConfigError(f"{where} has no percentile {' and '.join(missing)} of {metric!r}.")
    return dict(sorted(found.items()))


def rpc_page(sweep: RpcSweep) -> Page:
    """Returns a page with four figures, the table of all percentiles, the arguments and the machine."""
    percentiles = sorted({percentile for rows in sweep.metrics.values() for row in rows for percentile in row})
    body = []
    for metric, rows in sweep.metrics.items():
        unit, per, digits = ("requests/s", 1.0, 0) if "throughput" in metric else ("ms", 1e3, 3)
        for x, row in zip(sweep.xs, rows, strict=True):
            numbers = [f"{row[p] * per:,.{digits}f}" if p in row else "" for p in percentiles]
            body.append([f"{metric}, {unit}", x, *numbers])
    head = ["", sweep.x_axis_name, *(f"p{p}" for p in percentiles)]
    sections = [section("All percentiles", table(head, body)), _totals(sweep), facts("Setting", sweep.arguments)]
    return Page(
        title=f"RPC benchmark by {sweep.x_axis_name}",
        lead="an agent serves act requests of observers.",
        charts={metric: rpc_chart(sweep, metric) for metric in METRICS},
        sections=sections + _machine(sweep.extra),
    )


def rpc_chart(sweep: RpcSweep, metric: str) -> Chart:
    """Returns the chart of one metric: two percentiles for each x."""
    rows = sweep.metrics[metric]
    unit, per = unit_of(metric, [row[percentile] for row in rows for percentile in DRAWN])
    series = []
    for percentile in DRAWN:
        heights = [row[percentile] * per for row in rows]
        series.append(Series(_legend(metric, percentile), tuple(heights), tuple(map(_height, heights))))
    text = X_TEXTS.get(sweep.x_axis_name)
    common = (f"{name} {sweep.arguments[name]}" for name in COMMON if name in sweep.arguments)
    return Chart(
        title=f"RPC benchmark: {metric}",
        note=f"{METRICS[metric]}.\n{'  ·  '.join(common)}",
        x_label=f"{sweep.x_axis_name}{f'  ({text})' if text else ''}",
        y_label=f"{metric}, {unit}",
        xs=sweep.xs,
        series=tuple(series),
    )


def unit_of(metric: str, values: Sequence[float]) -> tuple[str, float]:
    """Returns a readable unit for the largest of `values`, and its number per second."""
    if "throughput" in metric:
        return "requests/s", 1.0
    largest = max(values)
    return ("s", 1.0) if largest >= 10.0 else ("ms", 1e3) if largest >= 1e-3 else ("µs", 1e6)


def _height(height: float) -> str:
    """Returns a bar's label: three digits, or all digits before the point."""
    return f"{height:,.0f}" if height == 0 or height >= 99.95 else f"{height:.3g}"


def _legend(metric: str, percentile: int) -> str:
    if percentile == 50:
        return "p50: the median"
    what = "batches" if "agent" in metric else "requests"
    return f"p{percentile}: {100 - percentile} % of {what} {'were faster' if 'throughput' in metric else 'took longer'}"


def _totals(sweep: RpcSweep) -> str:
    """Returns the totals of each run, if the report has them."""
    runs = sweep.extra.get("runs")
    if not isinstance(runs, list) or len(runs) != len(sweep.xs) or not all(isinstance(run, dict) for run in runs):
        return ""
    body = [[x, *(amount(run.get(key)) for key in TOTALS)] for x, run in zip(sweep.xs, runs, strict=True)]
    return section("Totals, without the warm-up", table([sweep.x_axis_name, *TOTALS.values()], body))


# Reports of `replay`.


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """One run in a report of `replay`: the values of the varied arguments, and the measures."""

    mode: str
    varied: Mapping[str, Any]
    measures: Annotated[tuple[Measure, ...], msgspec.Meta(min_length=1)]
    facts: Mapping[str, Figure]

    @property
    def label(self) -> str:
        return "\n".join(amount(value) for value in self.varied.values())


def read_runs(report: Mapping[str, Any], where: Path) -> list[ReplayRun]:
    """Returns the runs of a report; raises ConfigError if it is invalid."""
    if not report.get("runs"):
        raise ConfigError(
            f"{where} is a report of `echelon bench replay` without `runs`. Make one with `echelon bench replay "
            "--output FILE`."
        )
    try:
        return msgspec.convert(report["runs"], list[ReplayRun])
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{where} is damaged: {error} of its runs. Measure again with `echelon bench replay --output FILE`."
        ) from error


def replay_page(report: Mapping[str, Any], path: Path) -> Page:
    """Returns the page of a report: for a sweep one figure per measure, for a single run one figure per unit."""
    runs = read_runs(report, path)
    setting: dict[str, Any] = found if isinstance(found := report.get("setting"), dict) else {}
    varied = ", ".join(runs[0].varied)
    return Page(
        title=f"Replay benchmark{f' by {varied}' if varied else ''}",
        lead="prioritized replay, full; medians over the rounds.",
        charts=_over_runs(runs, setting) if len(runs) > 1 else _over_measures(runs[0], setting),
        sections=[_measures(runs), _facts(runs), facts("Setting", setting), *_machine(report)],
    )


def _over_measures(run: ReplayRun, setting: Mapping[str, Any]) -> dict[str, Chart]:
    charts = {}
    for unit in dict.fromkeys(measure.unit for measure in run.measures):
        measures = [measure for measure in run.measures if measure.unit == unit]
        title = UNIT_TITLES.get(unit, unit)
        names = [measure.name.replace(" per ", "\nper ").replace(" by ", "\nby ") for measure in measures]
        note = f"Prioritized replay, full. {'Lower' if unit == 'bytes' else 'Higher'} is better."
        charts[title] = _replay_chart(title, note, dict(zip(names, measures, strict=True)), run, setting)
    return charts


def _over_runs(runs: Sequence[ReplayRun], setting: Mapping[str, Any]) -> dict[str, Chart]:
    charts = {}
    for name in dict.fromkeys(measure.name for run in runs for measure in run.measures):
        found = {run.label: measure for run in runs for measure in run.measures if measure.name == name}
        first = next(run for run in runs if any(measure.name == name for measure in run.measures))
        charts[name] = _replay_chart(name, f"{MEASURES.get(name, name)}.", found, first, setting)
    return charts


def _replay_chart(
    title: str, note: str, measures: Mapping[str, Measure], run: ReplayRun, setting: Mapping[str, Any]
) -> Chart:
    """Returns a chart of measures by label; the labels include the ratio to the peer."""
    medians = [spread.median for measure in measures.values() for spread in measure.by.values()]
    unit = next(iter(measures.values())).unit
    per, unit = (MILLION, f"million {unit}") if max(medians) >= MILLION else (1.0, unit)
    series = []
    for who in dict.fromkeys(name for measure in measures.values() for name in measure.by):
        spreads = [measure.by.get(who) for measure in measures.values()]
        heights = tuple(None if spread is None else spread.median / per for spread in spreads)
        series.append(Series(who, heights, tuple("" if h is None else _height(h) for h in heights)))
    ticks = [
        label if measure.ratio is None else f"{label}\n{measure.ratio:.2f}×" for label, measure in measures.items()
    ]
    peers = [who for measure in measures.values() if measure.ratio is not None for who in list(measure.by)[1:]]
    parts_of_x = [" / ".join(run.varied), *(f"×: echelon over {who}" for who in peers[:1])]
    shown = (f"{name} {amount(setting[name])}" for name in SHOWN.get(run.mode, ()) if setting.get(name))
    return Chart(
        title=f"Replay: {title}",
        note=f"{note}\n{'  ·  '.join(shown)}",
        x_label="  ·  ".join(part for part in parts_of_x if part),
        y_label=unit,
        xs=tuple(ticks),
        series=tuple(series),
    )


def _measures(runs: Sequence[ReplayRun]) -> str:
    body = []
    for run in runs:
        varied = [amount(value) for value in run.varied.values()]
        for measure in run.measures:
            for number, (who, spread) in enumerate(measure.by.items()):
                figures = [f"{value:,.0f}" for value in (spread.median, spread.low, spread.high)]
                ratio = f"{measure.ratio:.2f}×" if measure.ratio is not None and number == 0 else ""
                body.append([f"{measure.name}, {measure.unit}", *varied, who, *figures, ratio])
    head = ["", *runs[0].varied, "buffer", "median", "lower quartile", "upper quartile", "ratio"]
    return section("All measurements", table(head, body))


def _facts(runs: Sequence[ReplayRun]) -> str:
    names = [name for name in FACTS if any(name in run.facts for run in runs)]
    if not names:
        return ""
    body = [[amount(value) for value in (*run.varied.values(), *map(run.facts.get, names))] for run in runs]
    return section("Counted once", table([*runs[0].varied, *(FACTS[name] for name in names)], body))
