"""The report of a sweep of `echelon bench rpc`, read and checked.

The reports of PyTorch's own RPC benchmark are read too: percentiles are named "50" or "p50", and a latency may have its
unit in its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import ConfigError

METRICS = ("agent throughput", "observer throughput", "agent latency", "observer latency")
DRAWN = (50, 95)  # percentiles; the page's table has all


@dataclass(frozen=True, slots=True)
class Sweep:
    """A report: the percentiles of every metric, for each value of the argument that was varied."""

    x_axis_name: str
    xs: tuple[str, ...]
    metrics: Mapping[str, tuple[Mapping[int, float], ...]]  # seconds or requests per second, by percentile, per x
    arguments: Mapping[str, Any]  # what all runs had in common
    extra: Mapping[str, Any]  # what our own reports say besides: hardware, versions, runs


def read_sweep(path: Path) -> Sweep:
    """The report at `path`, checked: what is wrong with it is a ConfigError."""
    return sweep_of(load_report(path), path)


def sweep_of(report: Mapping[str, Any], path: Path) -> Sweep:
    """The report that was loaded from `path`, checked."""
    x_axis_name, results = report.get("x_axis_name"), report.get("benchmark_results")
    if not isinstance(results, list) or not results:
        raise ConfigError(
            f"{path} is {_kind(report)}: it has no list of `benchmark_results`. `plot` draws reports of `rpc` and "
            "`replay`: make one with `echelon bench rpc --world_size 10,20 --output_file_path FILE`."
        )
    if not isinstance(x_axis_name, str) or not x_axis_name:
        raise ConfigError(
            f"{path} has no x axis to draw along: no `x_axis_name`, so it is of a single setting. Give one argument a "
            "list of values, as in `echelon bench rpc --world_size 10,20`, and draw that report."
        )
    for number, result in enumerate(results):
        if not isinstance(result, dict) or x_axis_name not in result:
            raise ConfigError(f"{path}: benchmark_results[{number}] has no {x_axis_name!r}, the x axis of the report.")
    extra = report.get("echelon")
    return Sweep(
        x_axis_name=x_axis_name,
        xs=tuple(str(result[x_axis_name]) for result in results),
        metrics={
            metric: tuple(
                _percentiles(result, metric, f"{path}: benchmark_results[{number}]")
                for number, result in enumerate(results)
            )
            for metric in METRICS
        },
        arguments={k: v for k, v in report.items() if k not in ("x_axis_name", "benchmark_results", "echelon")},
        extra=extra if isinstance(extra, dict) else {},
    )


def _kind(report: Mapping[str, Any]) -> str:
    bench = report.get("bench")
    return f"a report of `echelon bench {bench}`" if isinstance(bench, str) else "not a report of `echelon bench rpc`"


def load_report(path: Path) -> dict[str, Any]:
    """The object in the file at `path`, of whatever benchmark it is."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"report {path} cannot be read: {error.strerror}. `echelon bench rpc --world_size 10,20` makes one, and "
            "`echelon bench replay --output FILE`."
        ) from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise ConfigError(f"report {path} is not JSON: {error}. Give the file that a benchmark wrote.") from error
    if not isinstance(report, dict):
        raise ConfigError(
            f"report {path} holds a {type(report).__name__} where an object is expected. Give the file that a "
            "benchmark wrote."
        )
    return report


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
