"""What every benchmark shares: settings, sweeps, turns, figures, and the report as JSON and as a table.

A benchmark is one class: a `Setting` whose fields describe its options, a method that measures one setting, and what it
prints and writes. The command line, its help and its checks come from the fields. Needs no torch.
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

from echelon.errors import ConfigError

S = TypeVar("S", bound="Setting")
R = TypeVar("R")
T = TypeVar("T")
Figure = Annotated[float, msgspec.Meta(ge=0.0)]  # as reports are read back
Progress = Callable[[int, int], None]  # (done so far, all of it)
TRUE, FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")

# Settings.


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a setting as the command line shows and checks it."""

    help: str
    default: str  # as text; a list where a sweep is the default
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
            raise ConfigError(f"{name}={value!r} is not known; there are {', '.join(self.choices)}.")


def option(value: Any, help: str, *, default: str | None = None, shown: str | None = None, **limits: Any) -> Any:
    """A field of a setting: its value, its help and its limits."""
    text = str(value) if default is None else default
    return field(default=value, metadata={"option": Option(help, text, text if shown is None else shown, **limits)})


@dataclass(frozen=True, slots=True)
class Setting:
    """What one run is asked for: a frozen dataclass whose fields are made by `option`."""

    def __post_init__(self) -> None:
        for name, each in self.options().items():
            each.check(name, getattr(self, name))
        self.check()

    def check(self) -> None:
        """Raises ConfigError where fields do not go together."""

    @classmethod
    def options(cls) -> dict[str, Option]:
        return {each.name: each.metadata["option"] for each in dataclasses.fields(cls)}

    @classmethod
    def parse(cls, name: str, text: str) -> Any:
        """What `text` says for the field `name`, in the type of its default."""
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
    """The runs that a command asks for: one for each combination of the values of the options that are lists."""

    settings: tuple[S, ...]
    varied: tuple[str, ...] = ()

    @classmethod
    def parse(
        cls, kind: type[S], texts: Mapping[str, str], swept: Collection[str], max_varied: int | None = None
    ) -> Sweep[S]:
        """The runs of the options `texts`, of which those in `swept` may be lists, at most `max_varied` at once."""
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
        """The fields that all runs share."""
        return {name: value for name, value in dataclasses.asdict(self.settings[0]).items() if name not in self.varied}

    def values(self, setting: S) -> dict[str, Any]:
        """The fields that differ from run to run, as `setting` has them."""
        return {name: getattr(setting, name) for name in self.varied}


# Measuring.


@dataclass(frozen=True, slots=True)
class Repeated:
    """How often something was done, and what that took."""

    count: int
    wall_s: float
    cpu_s: float


def repeat(work: Callable[[], object], seconds: float) -> Repeated:
    """Calls `work` for `seconds`, and at least once however busy the machine is."""
    clock, count = time.perf_counter, 0
    start, start_cpu = clock(), time.process_time()
    while (wall_s := clock() - start) < seconds or not count:
        work()
        count += 1
    return Repeated(count, wall_s, time.process_time() - start_cpu)


def in_turns(parties: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Every party once in every round, in an order that turns around: a slow moment of the machine slows all alike."""
    for number in range(rounds):
        for party in parties if number % 2 == 0 else parties[::-1]:
            yield number, party


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the rounds: its median, and the quartiles around it."""

    median: Figure
    low: Figure
    high: Figure

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Spread:
        low, median, high = np.percentile(rounds, (25, 50, 75)).tolist()
        return cls(median, low, high)


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure for each party that was measured; the first is ours, and `ratio` is ours over the second."""

    name: str
    unit: str
    by: Annotated[Mapping[str, Spread], msgspec.Meta(min_length=1)]
    ratio: Figure | None = None  # the median over the rounds, each of which compares neighbours in time

    @classmethod
    def of(cls, name: str, unit: str, rounds: Mapping[str, Sequence[float]]) -> Measure:
        ours, *peers = rounds.values()
        ratios = [one / other for peer in peers[:1] for one, other in zip(ours, peer, strict=True) if other]
        ratio = float(np.median(ratios)) if ratios else None
        return cls(name, unit, {who: Spread.of(values) for who, values in rounds.items()}, ratio)


# Reporting.


@dataclass(slots=True)
class Runs(Generic[S, R]):
    """What a sweep has measured so far."""

    sweep: Sweep[S]
    results: list[R] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[S, R]]:
        return iter(zip(self.sweep.settings, self.results, strict=False))

    @property
    def newest(self) -> tuple[S, R]:
        return self.sweep.settings[len(self.results) - 1], self.results[-1]


class Benchmark(ABC, Generic[S, R]):
    """One subcommand of `echelon bench`: the settings it takes, how it measures one, and what it reports."""

    name: str
    text: str  # what `--help` says
    setting: type[S]
    output: str = "output"  # the option that names the file of the report
    output_help: str = "write the report here, as JSON"
    swept: Collection[str] = ()  # the options that may be lists
    max_varied: int | None = None  # and how many of them at once

    def spellings(self, name: str) -> Sequence[str]:
        """The words for the option `name`."""
        return (f"--{name.replace('_', '-')}",)

    def metavar(self, name: str) -> str:
        """What stands for the value of the option `name` in the help."""
        return self.setting.options()[name].metavar

    def prepare(self, settings: Sequence[S]) -> None:
        """Raises ConfigError where a run cannot start: a sweep should not find that out half-way."""

    @abstractmethod
    def measure(self, setting: S, progress: Progress) -> R: ...

    @abstractmethod
    def unit(self, setting: S) -> str:
        """What the progress counts."""

    def label(self, setting: S) -> str:
        """The name of a run that varies nothing."""
        return self.name

    def head(self, sweep: Sweep[S]) -> str:
        """What is printed before the first run."""
        return ""

    def newest(self, runs: Runs[S, R]) -> str:
        """What is printed after every run."""
        return ""

    def summary(self, runs: Runs[S, R]) -> str:
        """What is printed after the last run."""
        return ""

    def fault(self, runs: Runs[S, R]) -> str:
        """Why the command fails although everything was measured; empty where it does not."""
        return ""

    def is_drawn(self, sweep: Sweep[S]) -> bool:
        """Whether `echelon bench plot` draws the report."""
        return False

    @abstractmethod
    def report(self, runs: Runs[S, R]) -> dict[str, Any]:
        """The report as JSON."""


@functools.cache
def machine(device: str = "cpu") -> dict[str, Any]:
    """What a benchmark ran on, for its report: hardware and versions."""
    from echelon.runs.folder import versions  # imports torch, whose memory and time are not the benchmark's

    return {"hardware": hardware(device), "versions": versions()}


def hardware(device: str = "cpu") -> dict[str, Any]:
    """Cores, memory, processor, and the GPU where `device` is one."""
    gpu = None
    if device != "cpu":
        import torch

        gpu = torch.cuda.get_device_name(device) if torch.cuda.is_available() else None
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "processor": next(names, "unknown"),
        "gpu": gpu,
    }


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Replaces the file at `path`, whole or not at all."""
    from echelon.runs.metrics import plain

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(plain(report), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def measure_table(measures: Sequence[Measure], title: str, compare: Callable[[Measure], float | None]) -> list[str]:
    """The medians over the rounds with their quartiles, and under `title` how ours compares with the peer."""
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
    """Names and values below each other."""
    width = max((len(titles[name]) for name in facts), default=0)
    return [f"{titles[name]:<{width}}  {amount(value):>14}" for name, value in facts.items()]


def columns(rows: Iterable[Iterable[str]], width: int) -> list[str]:
    """Cells in columns of equal width."""
    return ["".join(f"{cell:>{width}}" for cell in row) for row in rows]


def amount(value: Any) -> str:
    """A number as people read it, with three digits or more; other values as they are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
