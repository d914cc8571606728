"""Shared parts of all benchmarks: settings, sweeps, measuring, and the report as JSON and as a table.

A benchmark is one class: a `Setting` whose fields describe its options, a method that measures one setting, and its
output. The command line, its help and its checks are derived from the fields. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np

from echelon.control_groups import num_cores
from echelon.errors import ConfigError

S = TypeVar("S", bound="Setting")
R = TypeVar("R")
T = TypeVar("T")
Figure = Annotated[float, msgspec.Meta(ge=0.0)]  # validated when a report is read
Progress = Callable[[int, int], None]  # (done, total)
TRUE, FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")

# Settings.


@dataclass(frozen=True, slots=True)
class Option:
    """How the command line shows and checks one field of a setting."""

    help: str
    default: str  # as text; a list if the default is a sweep
    shown: str  # the default as the help shows it
    least: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    metavar: str = "VALUE"

    def check(self, name: str, value: Any) -> None:
        """Raises ConfigError unless `value` is allowed."""
        if self.least is not None and not value >= self.least:
            raise ConfigError(f"{name}={value} must be at least {self.least:g}.")
        if self.above is not None and not self.above < value < math.inf:
            raise ConfigError(f"{name}={value} must be a number above {self.above:g}.")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{name}={value!r} is unknown; use one of {', '.join(self.choices)}.")


def option(value: Any, help: str, *, default: str | None = None, shown: str | None = None, **limits: Any) -> Any:
    """Returns a field of a setting: its default, help and limits."""
    text = str(value) if default is None else default
    return field(default=value, metadata={"option": Option(help, text, text if shown is None else shown, **limits)})


@dataclass(frozen=True, slots=True)
class Setting:
    """The arguments of one run: a frozen dataclass whose fields are defined with `option`."""

    def __post_init__(self) -> None:
        for name, each in self.options().items():
            each.check(name, getattr(self, name))
        self.check()

    def check(self) -> None:
        """Raises ConfigError if fields do not fit each other."""

    @classmethod
    def options(cls) -> dict[str, Option]:
        return {each.name: each.metadata["option"] for each in dataclasses.fields(cls)}

    @classmethod
    def parse(cls, name: str, text: str) -> Any:
        """Parses `text` for the field `name`, as the type of its default."""
        default: Any = next(each.default for each in dataclasses.fields(cls) if each.name == name)
        word = text.strip()
        if isinstance(default, bool):
            if word.lower() not in TRUE + FALSE:
                raise ConfigError(f"{name}={text!r}: Boolean value expected. Write True or False.")
            return word.lower() in TRUE
        try:
            return type(default)(word)
        except ValueError as error:
            option = f"--{name.replace('_', '-')} {default}"
            raise ConfigError(f"{name}={text!r} is not a number. Write {option}.") from error


@dataclass(frozen=True, slots=True)
class Sweep(Generic[S]):
    """The runs of a command: one for each combination of the values of options that are lists."""

    settings: tuple[S, ...]
    varied: tuple[str, ...] = ()

    @classmethod
    def parse(
        cls, kind: type[S], texts: Mapping[str, str], swept: Collection[str], max_varied: int | None = None
    ) -> Sweep[S]:
        """Returns the runs of the options `texts`; those in `swept` may be lists, at most `max_varied` of them."""
        words = {name: text.split(",") if name in swept else [text] for name, text in texts.items()}
        varied = tuple(name for name, each in words.items() if len(each) > 1)
        if max_varied is not None and len(varied) > max_varied:
            given = " and ".join(f"{name}={texts[name]}" for name in varied)
            raise ConfigError(
                f"Only {max_varied} x axis graph variable allowed, but {given} are lists. Give a list to one of them."
            )
        values = [[kind.parse(name, word) for word in each] for name, each in words.items()]
        chosen = itertools.product(*values)
        return cls(tuple(kind(**dict(zip(words, each, strict=True))) for each in chosen), varied)

    @property
    def common(self) -> dict[str, Any]:
        """Returns the fields that are equal in all runs."""
        return {name: value for name, value in dataclasses.asdict(self.settings[0]).items() if name not in self.varied}

    def values(self, setting: S) -> dict[str, Any]:
        """Returns the fields that vary between runs, with the values of `setting`."""
        return {name: getattr(setting, name) for name in self.varied}


# Measuring.


@dataclass(frozen=True, slots=True)
class Repeated:
    """The number of repetitions, and the time they took."""

    count: int
    wall_s: float
    cpu_s: float


def repeat(work: Callable[[], object], seconds: float) -> Repeated:
    """Calls `work` repeatedly for `seconds`, at least once."""
    clock, count = time.perf_counter, 0
    start, start_cpu = clock(), time.process_time()
    while (wall_s := clock() - start) < seconds or not count:
        work()
        count += 1
    return Repeated(count, wall_s, time.process_time() - start_cpu)


def in_turns(parties: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yields every party once per round, alternating the order, so that a slow phase of the machine affects all."""
    for number in range(rounds):
        for party in parties if number % 2 == 0 else parties[::-1]:
            yield number, party


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and quartiles of a figure over the rounds."""

    median: Figure
    low: Figure
    high: Figure

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Spread:
        low, median, high = np.percentile(rounds, (25, 50, 75)).tolist()
        return cls(median, low, high)


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure per party; the first party is Echelon, and `ratio` is Echelon's figure over the second's."""

    name: str
    unit: str
    by: Annotated[Mapping[str, Spread], msgspec.Meta(min_length=1)]
    ratio: Figure | None = None  # median over the rounds, so that each ratio compares measurements close in time

    @classmethod
    def of(cls, name: str, unit: str, rounds: Mapping[str, Sequence[float]]) -> Measure:
        ours, *peers = rounds.values()
        ratios = [one / other for peer in peers[:1] for one, other in zip(ours, peer, strict=True) if other]
        ratio = float(np.median(ratios)) if ratios else None
        return cls(name, unit, {who: Spread.of(values) for who, values in rounds.items()}, ratio)


# Reporting.


@dataclass(slots=True)
class Runs(Generic[S, R]):
    """The results of a sweep so far."""

    sweep: Sweep[S]
    results: list[R] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[S, R]]:
        return iter(zip(self.sweep.settings, self.results, strict=False))

    @property
    def newest(self) -> tuple[S, R]:
        return self.sweep.settings[len(self.results) - 1], self.results[-1]


class Benchmark(ABC, Generic[S, R]):
    """One subcommand of `echelon bench`: its settings, how it measures one, and its report."""

    name: str
    text: str  # the text of `--help`
    setting: type[S]
    output: str = "output"  # the option for the report file
    output_help: str = "write the report here, as JSON"
    swept: Collection[str] = ()  # options that may be lists
    max_varied: int | None = None  # maximum number of lists

    def spellings(self, name: str) -> Sequence[str]:
        """Returns the spellings of the option `name`."""
        return (f"--{name.replace('_', '-')}",)

    def metavar(self, name: str) -> str:
        """Returns the placeholder for the value of the option `name` in the help."""
        return self.setting.options()[name].metavar

    def prepare(self, settings: Sequence[S]) -> None:
        """Raises ConfigError if a run cannot start, before the sweep begins."""

    @abstractmethod
    def measure(self, setting: S, progress: Progress) -> R: ...

    @abstractmethod
    def unit(self, setting: S) -> str:
        """Returns the unit of the progress."""

    def label(self, setting: S) -> str:
        """Returns the name of a run without varied options."""
        return self.name

    def head(self, sweep: Sweep[S]) -> str:
        """Returns the text printed before the first run."""
        return ""

    def newest(self, runs: Runs[S, R]) -> str:
        """Returns the text printed after every run."""
        return ""

    def summary(self, runs: Runs[S, R]) -> str:
        """Returns the text printed after the last run."""
        return ""

    def fault(self, runs: Runs[S, R]) -> str:
        """Returns why the command fails although all runs were measured; "" if it does not."""
        return ""

    def is_drawn(self, sweep: Sweep[S]) -> bool:
        """Returns whether `echelon bench plot` can draw the report."""
        return False

    @abstractmethod
    def report(self, runs: Runs[S, R]) -> dict[str, Any]:
        """Returns the report as JSON values."""


@functools.cache
def machine(device: str = "cpu") -> dict[str, Any]:
    """Returns the hardware and versions, for a report."""
    from echelon.runs.folder import (
        versions,
    )  # imported here: it imports torch, whose memory and time must not be measured

    return {"hardware": hardware(device), "versions": versions()}


def hardware(device: str = "cpu") -> dict[str, Any]:
    """Returns cores, memory, processor, and the GPU if `device` is one."""
    gpu = None
    if device != "cpu":
        import torch

        gpu = torch.cuda.get_device_name(device) if torch.cuda.is_available() else None
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cores": num_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "processor": next(names, "unknown"),
        "gpu": gpu,
    }


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Writes the report to `path` atomically."""
    from echelon.runs.metrics import plain

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(plain(report), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def measure_table(measures: Sequence[Measure], title: str, compare: Callable[[Measure], float | None]) -> list[str]:
    """Returns a table of the medians and quartiles, with the comparison to the peer in the column `title`."""
    width = max(len(measure.name) for measure in measures)
    names = list(measures[0].by)
    head = f"{'':<{width}}  {'':>7}" + "".join(f"{name:>14}{'quartiles':>22}" for name in names)
    rows = [head + (f"{title:>9}" if len(names) > 1 else "")]
    for measure in measures:
        spreads = measure.by.values()
        cells = [f"{amount(s.median):>14}{f'{amount(s.low)} – {amount(s.high)}':>22}" for s in spreads]
        factor = compare(measure)
        better = "" if factor is None else f"{factor:>8.2f}×"
        rows.append(f"{measure.name:<{width}}  {measure.unit:>7}{''.join(cells)}{better}")
    return rows


def fact_table(facts: Mapping[str, Any], titles: Mapping[str, str]) -> list[str]:
    """Returns a table of names and values."""
    width = max((len(titles[name]) for name in facts), default=0)
    return [f"{titles[name]:<{width}}  {amount(value):>14}" for name, value in facts.items()]


def columns(rows: Iterable[Iterable[str]], width: int) -> list[str]:
    """Returns cells in columns of equal width."""
    return ["".join(f"{cell:>{width}}" for cell in row) for row in rows]


def amount(value: Any) -> str:
    """Formats a number with at least three digits; returns other values as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
