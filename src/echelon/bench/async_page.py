"""The figures and the page of a report of `echelon bench async`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from echelon.bench.figures import Chart, Page, Series, section, table
from echelon.bench.harness import Figure, Spread
from echelon.bench.timelines import Panel, Timelines
from echelon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Trained:
    """The runs of one K, synchronous or asynchronous."""

    interval_s: Spread
    eps: Figure
    bound_s: Figure
    share_of_bound: Figure


class ReportRow(msgspec.Struct, frozen=True, rename={"asynchronous": "async"}):
    """One K of a report."""

    envs: int
    sync: Trained
    asynchronous: Trained | None = None
    ratio: Figure | None = None
    bound_ratio: Figure | None = None


class AsyncReport(msgspec.Struct, frozen=True):
    """The part of a report that is drawn."""

    env: str
    num_actors: int
    num_cores: int
    minibatch: int
    rows: Annotated[tuple[ReportRow, ...], msgspec.Meta(min_length=1)]
    timelines: tuple[Panel, ...]
    config: dict[str, Any]

    @property
    def note(self) -> str:
        trajectory, passes = self.config["actor"]["trajectory"], self.config["algorithm"]["epochs"]
        return (
            f"PPO on {self.env}: unroll {trajectory}, {passes} passes, minibatches of {self.minibatch:,} steps, "
            f"{self.num_cores} cores"
        )


def async_page(report: Mapping[str, Any], path: Path, extra: Sequence[str]) -> Page:
    """Returns the page of a report, with the sections `extra` at its end; raises ConfigError if it is invalid."""
    try:
        found = msgspec.convert(report, AsyncReport)
        note = found.note
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged: {error}. Measure again with `echelon bench async ENV --output FILE`."
        ) from error
    timelines = Timelines("Rollouts and iterations, as they happened", note, found.timelines)
    return Page(
        title=f"Synchronous and asynchronous training of {found.env}",
        lead=f"{note}.",
        charts={"eps": _chart(found, note)},
        timelines={"timelines": timelines} if found.timelines else {},
        sections=[_table(found), *extra],
    )


def _chart(report: AsyncReport, note: str) -> Chart:
    """Returns EPS by K: of both kinds of training, and the bound of the asynchronous one."""
    rows, together = report.rows, [row.asynchronous for row in report.rows]
    eps: dict[str, list[float | None]] = {
        "sync": [row.sync.eps for row in rows],
        f"async, {report.num_actors} actors": [found.eps if found else None for found in together],
        "async, bound of this machine": [
            row.envs / found.bound_s if found else None for row, found in zip(rows, together, strict=True)
        ],
    }
    series = [
        Series(name, tuple(heights), tuple("" if height is None else f"{height:.3g}" for height in heights))
        for name, heights in eps.items()
    ]
    return Chart(
        title="Throughput: environments per second of an iteration",
        note=f"EPS = K / T, T: mean time between two iterations of the learner. Higher is better.\n{note}",
        x_label="K, environments per actor  ·  ×: async over sync",
        y_label="EPS",
        xs=tuple(f"{row.envs}" if row.ratio is None else f"{row.envs}\n{row.ratio:.2f}×" for row in rows),
        series=tuple(series),
    )


def _table(report: AsyncReport) -> str:
    body = []
    for row in report.rows:
        for name, trained in {"sync": row.sync, "async": row.asynchronous}.items():
            if trained is None:
                continue
            spread = trained.interval_s
            times = [f"{value:.3g}" for value in (spread.median, spread.low, spread.high, trained.eps, trained.bound_s)]
            body.append([f"{row.envs}", name, *times, f"{trained.share_of_bound:.0%}"])
    head = ["K", "", "T, s", "lower quartile", "upper quartile", "EPS", "bound of T, s", "of the bound"]
    return section("All measurements", table(head, body))
