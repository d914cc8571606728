"""The report of `echelon bench replay`: what every run measured, as JSON and as tables."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.bench.replay.setting import Measure, Result, Setting, Spread
from echelon.errors import ConfigError

BENCH = "replay"
FACTS = {
    "num_transitions": "transitions",
    "frames_per_transition": "memory of a transition, in frames",
    "frames_per_unshared_transition": "the same if stacks were stored whole",
    "replay_resident_gb": "resident memory of the replay, GB",
    "process_resident_gb": "resident memory of the process, GB",
    "num_checked": "items checked",
    "num_torn": "items torn",
}
SHOWN = {
    "process": ("capacity", "batch", "chunk", "observation", "shards", "alpha"),
    "writers": ("writers", "rate", "capacity", "batch", "chunk", "observation", "alpha"),
    "frames": ("frames", "capacity", "batch", "alpha"),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One result in a report: the arguments that vary in the sweep, with their values here, and what was measured."""

    mode: str
    varied: Mapping[str, Any]
    result: Result

    @property
    def label(self) -> str:
        return "\n".join(f"{value:,}" if isinstance(value, int) else str(value) for value in self.varied.values())


class Report:
    """Grows by one run at a time; `varied` are the arguments that differ from run to run."""

    def __init__(self, settings: Sequence[Setting], varied: Sequence[str] = ()) -> None:
        arguments = dataclasses.asdict(settings[0])
        self.arguments = {name: value for name, value in arguments.items() if name not in varied}
        self.varied = tuple(varied)
        self.runs: list[Run] = []

    def add(self, setting: Setting, result: Result) -> None:
        self.runs.append(Run(setting.mode, {name: getattr(setting, name) for name in self.varied}, result))

    @functools.cached_property
    def machine(self) -> dict[str, Any]:
        """What all runs ran on."""
        from echelon.bench.machine import hardware
        from echelon.runs.folder import versions  # brings torch along, whose memory is not the replay's

        return {"hardware": hardware(), "versions": versions()}

    def to_json(self) -> dict[str, Any]:
        runs = [
            {
                "mode": run.mode,
                "varied": dict(run.varied),
                "measures": [dataclasses.asdict(measure) for measure in run.result.measures],
                "facts": dict(run.result.facts),
            }
            for run in self.runs
        ]
        return {"bench": BENCH, "setting": self.arguments, "runs": runs, **self.machine}

    def write(self, path: Path) -> None:
        """Replaces the file at `path`, whole or not at all."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    # As a table.

    def last(self) -> str:
        """The newest run."""
        run = self.runs[-1]
        values = {**self.arguments, **run.varied}
        head = ", ".join(f"{name} {amount(values[name])}" for name in SHOWN[run.mode] if values[name])
        return "\n".join([f"\n{head}", "", *_table(run.result.measures), *_facts(run.result.facts)])


def _table(measures: Sequence[Measure]) -> list[str]:
    names = list(measures[0].by)
    width = max(len(measure.name) for measure in measures)
    head = f"{'':<{width}}  {'':>7}" + "".join(f"{name:>14}{'quartiles':>22}" for name in names)
    rows = [head + (f"{'ratio':>8}" if len(names) > 1 else "")]
    for measure in measures:
        cells = [f"{s.median:>14,.0f}{f'{s.low:,.0f} – {s.high:,.0f}':>22}" for s in measure.by.values()]
        ratio = f"{measure.ratio:>7.2f}×" if measure.ratio is not None else ""
        rows.append(f"{measure.name:<{width}}  {measure.unit:>7}{''.join(cells)}{ratio}")
    return rows


def _facts(facts: Mapping[str, int | float]) -> list[str]:
    width = max((len(FACTS[name]) for name in facts), default=0)
    return [""] * bool(facts) + [f"{FACTS[name]:<{width}}  {amount(value):>14}" for name, value in facts.items()]


def amount(value: Any) -> str:
    """A number as people read it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.10g}"


# Read back.


def read_runs(report: Mapping[str, Any], where: Path) -> list[Run]:
    """The runs of a report, checked: what is wrong with it is a ConfigError."""
    runs = report.get("runs")
    if not isinstance(runs, list) or not runs:
        raise ConfigError(
            f"{where} is a report of `echelon bench replay` without `runs`. Make one with `echelon bench replay "
            "--output FILE`."
        )
    try:
        return [_run(run) for run in runs]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where} is damaged: a run has no {error}, or not as it should be. Make it anew with `echelon bench "
            "replay --output FILE`."
        ) from error


def _run(run: Mapping[str, Any]) -> Run:
    measures = tuple(_measure(measure) for measure in run["measures"])
    if not measures:
        raise ValueError("measure")
    facts = {str(name): value for name, value in run["facts"].items() if name in FACTS and _figure(value) >= 0}
    return Run(str(run["mode"]), {str(name): value for name, value in run["varied"].items()}, Result(measures, facts))


def _measure(measure: Mapping[str, Any]) -> Measure:
    by = {
        str(who): Spread(*(_figure(spread[key]) for key in ("median", "low", "high")))
        for who, spread in measure["by"].items()
    }
    if not by:
        raise ValueError("buffer in a measure")
    ratio = None if measure["ratio"] is None else _figure(measure["ratio"])
    return Measure(str(measure["name"]), str(measure["unit"]), by, ratio)


def _figure(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"number in {value!r}")
    return float(value)
