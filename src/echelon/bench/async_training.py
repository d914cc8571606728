"""`echelon bench async`: the throughput of synchronous and asynchronous PPO, compared with the bound of this machine.

Synchronous: one actor of K environments and the learner take turns. Asynchronous: N actors of K environments each roll
out while the learner learns from one trajectory at a time. T is the mean time between two iterations of the learner,
and EPS = K / T. All else is equal, so that EPS compares them: the size of a batch, the passes and the minibatches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

from echelon import config_io
from echelon.bench.async_bound import (
    Bound,
    Cost,
    Learning,
    mean_cost,
    measure_learning,
    measure_rollout,
    median_cost,
)
from echelon.bench.async_runs import Progress, Ran, num_iterations, run_training, window
from echelon.bench.async_setting import ASYNC, SETS_STOP, SYNC, AsyncSetting
from echelon.bench.harness import Spread, columns, in_turns, machine
from echelon.config import TrainConfig, replace
from echelon.errors import ConfigError
from echelon.names import text_of
from echelon.roles.plan.start import num_cores_of
from echelon.runs.timeline import Span

SHOWN_INTERVALS = 3  # of synchronous training that a timeline shows
MAX_OTHERS = 0.1  # cores that other programs may use during a run
LEARNING_SHARE = 3.0  # learning over rollouts in a run that learning bounds, where both share the cores
Show = Callable[[str], AbstractContextManager[Progress]]  # makes the progress of a run, by its label
Save = Callable[[dict[str, Any]], None]


def bench_async(config: TrainConfig, setting: AsyncSetting, show: Show, save: Save) -> dict[str, Any]:
    """Measures every K; calls `save` with the report so far after each. Returns the whole report."""
    _check(config)
    bench = AsyncBench(config, setting, show)
    for num_envs, kinds in setting.rows.items():
        bench.measure(num_envs, kinds)
        save(bench.report())
    if setting.with_timelines:
        bench.complete_timelines()
        save(bench.report())
    return bench.report()


def _check(config: TrainConfig) -> None:
    if config.engine != "local":
        raise ConfigError(
            f"engine={config.engine}: asynchronous training needs a process for each role, and the bound is that of "
            "one machine. Use --engine local."
        )
    stop = config.stop
    if stop.steps or stop.minutes or stop.episodes or stop.until_return is not None:
        raise ConfigError(SETS_STOP)
    if config.run.dir:
        raise ConfigError(f"run.dir={config.run.dir}: the benchmark makes several runs. Remove it.")


class AsyncBench:
    """The measurements so far."""

    def __init__(self, config: TrainConfig, setting: AsyncSetting, show: Show) -> None:
        self.config, self.setting, self.show = config, setting, show
        self.num_cores = num_cores_of(config)
        self.rows: list[dict[str, Any]] = []
        self.timelines: dict[str, dict[str, Any]] = {}  # by kind
        self.newest: dict[str, Ran] = {}  # of the first K
        self.first: Bound | None = None  # of the first K
        self.device, self.threads = "cpu", 1  # of the learner

    def config_of(self, kind: str, num_envs: int, **changes: Any) -> TrainConfig:
        """Returns the configuration of one training."""
        mode = self.config.acting.mode
        values: dict[str, Any] = {
            "actor.envs": num_envs,
            "actor.num_actors": 1 if kind == SYNC else self.setting.num_actors,
            "learner.batch": 1,  # trajectories
            "learner.max_lag": 0 if kind == SYNC else None,
            "algorithm.minibatches": self.num_minibatches(num_envs),
            "acting.mode": "local" if mode == "auto" else mode,  # a choice could differ from K to K
        }
        return replace(self.config, **{**values, **changes})

    def num_minibatches(self, num_envs: int) -> int:
        return max(1, round(num_envs * self.config.actor.trajectory / self.setting.minibatch))

    def measure(self, num_envs: int, kinds: tuple[str, ...]) -> None:
        """Measures the costs and trains each kind, in turns, round after round."""
        initial, learnings = list[Cost](), list[Learning]()
        ran = {kind: list[Ran]() for kind in kinds}
        for number, kind in in_turns(kinds, self.setting.rounds):
            if len(learnings) <= number:
                config = self.config_of(kinds[-1], num_envs)
                with self.show(f"K={num_envs}, rollout and learning alone"):
                    initial.append(measure_rollout(config))
                    learnings.append(measure_learning(config))
            self.device, self.threads = learnings[-1].device, learnings[-1].threads
            ran[kind].append(self._run(kind, num_envs, Bound(initial[-1], learnings[-1].cost, self.num_cores)))
        learn = median_cost(one.cost for one in learnings)
        bounds = {}
        for kind, runs in ran.items():
            means = [mean_cost((first, run.rollout)) for first, run in zip(initial, runs, strict=True)]
            bounds[kind] = Bound(median_cost(means), learn, self.num_cores)
        self.rows.append(self._row(num_envs, bounds, ran))
        if self.first is None:
            self.first, self.newest = bounds[ASYNC], {kind: runs[-1] for kind, runs in ran.items()}
            for kind, run in self.newest.items():
                self._add_timeline(kind, run, "")

    def _run(self, kind: str, num_envs: int, bound: Bound, **changes: Any) -> Ran:
        """Trains for as many iterations as the bound allows in the time of a run, or until the score."""
        setting = self.setting
        config = self.config_of(kind, num_envs, **{"learner.threads": self.threads, **changes})
        interval_s = bound.sync_s if kind == SYNC else bound.async_s(setting.num_actors)
        count: int | None = num_iterations(config.actor.num_actors, setting.run_s, interval_s)
        if setting.score is not None and not changes:
            stop = {"stop.until_return": setting.score, "stop.minutes": setting.run_s / 60}
            config, count = replace(config, **stop), None
        with self.show(f"K={num_envs}, {kind}, about {interval_s:.3g} s an iteration") as progress:
            return run_training(config, count, self.num_cores, progress)

    def _row(self, num_envs: int, bounds: Mapping[str, Bound], ran: Mapping[str, list[Ran]]) -> dict[str, Any]:
        intervals = {kind: [run.iterations.interval_s for run in runs] for kind, runs in ran.items()}
        ratios = [one / other for one, other in zip(intervals[SYNC], intervals.get(ASYNC, ()), strict=False)]
        row: dict[str, Any] = {
            "envs": num_envs,
            "minibatches": self.num_minibatches(num_envs),
            "learner_threads": self.threads,
            "learn": asdict(bounds[SYNC].learn),
            "ratio": statistics.median(ratios) if ratios else None,
        }
        num_actors = self.setting.num_actors
        for kind, runs in ran.items():
            bound, spread = bounds[kind], Spread.of(intervals[kind])
            bound_s = bound.sync_s if kind == SYNC else bound.async_s(num_actors)
            row[kind] = {
                "interval_s": asdict(spread),
                "eps": num_envs / spread.median,
                "rollout": asdict(bound.rollout),
                "work_s": bound.rollout.cpu_s + bound.learn.cpu_s,
                "bound_s": bound_s,
                "limit": "" if kind == SYNC else bound.limit(num_actors),
                "share_of_bound": bound_s / spread.median,
                "runs": [run.figures() for run in runs],
            }
        row["bound_ratio"] = row[SYNC]["bound_s"] / row[ASYNC]["bound_s"] if ASYNC in row else None
        return row

    # Timelines.

    def _add_timeline(self, kind: str, ran: Ran, change: str) -> None:
        """Keeps a part of the timelines of a run: some iterations after the warm-up."""
        measured, num_envs = ran.iterations, self.setting.envs[0]
        if kind == ASYNC:
            kind = f"{ASYNC}, {'learning' if measured.is_learning_bound else 'rollout'}-bound"
        if kind in self.timelines:  # another number of passes has not changed what bounds the run
            return
        start_s = measured.start_s
        end_s = min(measured.end_s, start_s + SHOWN_INTERVALS * self.newest[SYNC].iterations.interval_s)
        roles: dict[str, list[Span]] = {}
        for name, spans in measured.timelines.items():
            roles[name] = [(one - start_s, other - start_s) for one, other in window(spans, start_s, end_s)]
        num_actors = len(roles) - 1
        interval_s = measured.interval_s
        self.timelines[kind] = {
            "title": f"{kind}: {num_actors} × {num_envs} environments, T = {interval_s:.3g} s, EPS = "
            f"{num_envs / interval_s:.3g}" + (f" ({change})" if change else ""),
            "interval_s": interval_s,
            "end_s": end_s - start_s,
            "roles": roles,
        }

    def complete_timelines(self) -> None:
        """Trains once more, with another number of passes, so that there is a timeline bound by the other side."""
        assert self.first is not None, "a K was measured"
        bound, passes = self.first, config_io.to_json(self.config)["algorithm"]["epochs"]
        others = 1.0
        if not self.newest[ASYNC].iterations.is_learning_bound:
            rollouts_s = bound.terms(self.setting.num_actors)["rollouts"]
            others = math.ceil(passes * max(1.0, LEARNING_SHARE * rollouts_s / bound.learn.wall_s))
        if others == passes:
            return
        scale, learn = others / passes, bound.learn
        other = Bound(bound.rollout, Cost(scale * learn.cpu_s, scale * learn.wall_s), self.num_cores)
        ran = self._run(ASYNC, self.setting.envs[0], other, **{"algorithm.epochs": int(others)})
        self._add_timeline(ASYNC, ran, f"passes over a batch: {others:g} in place of {passes:g}")

    def report(self) -> dict[str, Any]:
        setting, config = self.setting, self.config
        kinds = sorted(self.timelines, key=lambda kind: (kind != SYNC, kind))
        return {
            "bench": "async",
            "env": text_of(config.env.id),
            "num_actors": setting.num_actors,
            "minibatch": setting.minibatch,
            "seconds": setting.run_s,
            "rounds": setting.rounds,
            "score": setting.score,
            "num_cores": self.num_cores,
            "device": self.device,
            **machine(self.device),
            "rows": self.rows,
            "timelines": [self.timelines[kind] for kind in kinds],
            "config": config_io.to_json(config),
        }


def table(report: Mapping[str, Any]) -> str:
    """Returns the report as a text table."""
    config, rows = report["config"], report["rows"]
    trajectory, passes = config["actor"]["trajectory"], config["algorithm"]["epochs"]
    sizes = f"unroll {trajectory}, {passes} passes, minibatches of {report['minibatch']:,} steps"
    head = ["K", "sync (T, EPS)", "async (T, EPS)", "ratio", "bound (T, T)", "ratio", "of it", "work", "others"]
    body = [head, *map(_cells, rows)]
    widths = [max(len(row[place]) for row in body) for place in range(len(head))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in body]
    hardware = report["hardware"]
    notes = [
        f"T: seconds between two iterations of the learner; EPS: K / T. async: {report['num_actors']} actors.",
        f"bound: rollout and learning measured alone, on {report['num_cores']} cores of {hardware['processor']}"
        f"{', ' + hardware['gpu'] if hardware['gpu'] else ''}; `of it`: the share that was reached, sync and async.",
        "work: their processor time, as a share of that of the actors and the learner, sync and async.",
        "others: cores that other programs used during the runs, sync and async.",
    ]
    parts = ["", f"PPO on {report['env']}: {sizes}", "", *lines, "", *notes, *_disturbed(report), *_scores(report)]
    return "\n".join(parts)


def _disturbed(report: Mapping[str, Any]) -> list[str]:
    """Returns a warning if other programs used the cores: sync leaves some of them idle, async does not."""
    rows = [row for row in report["rows"] if any(others > MAX_OTHERS for others in _others(row) if others is not None)]
    if not rows:
        return []
    names = ", ".join(f"K={row['envs']}" for row in rows)
    return ["", f"warning: other programs took cores from {names}, from async more than from sync. Measure again."]


def _others(row: Mapping[str, Any]) -> list[float | None]:
    """Returns the cores that other programs used during the runs, sync and async; None if they were too short."""
    found = []
    for kind in (SYNC, ASYNC):
        used = [run["used"] for run in row.get(kind, {}).get("runs", ()) if run["used"] is not None]
        if kind in row:
            found.append(max((one["others_cores"] for one in used), default=None))
    return found


def _cells(row: Mapping[str, Any]) -> list[str]:
    both = [row[kind] for kind in (SYNC, ASYNC) if kind in row]
    pairs = [f"({one['interval_s']['median']:.3g}, {one['eps']:.3g})" for one in both]
    bounds = [f"{one['bound_s']:.3g}" for one in both]
    works = [one["work_s"] / statistics.median(run["work_s"] for run in one["runs"]) for one in both]
    return [
        str(row["envs"]),
        *(pairs if len(pairs) == 2 else [*pairs, ""]),
        _number(row["ratio"]),
        f"({', '.join(bounds)})",
        _number(row["bound_ratio"]),
        ", ".join(f"{one['share_of_bound']:.0%}" for one in both),
        ", ".join(f"{share:.0%}" for share in works),
        ", ".join("?" if others is None else f"{others:.2f}" for others in _others(row)),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _scores(report: Mapping[str, Any]) -> list[str]:
    """Returns the table of the times to the score."""
    if report["score"] is None:
        return []
    body = [["", "EPS", "seconds", "steps"]]
    for row in report["rows"]:
        for kind in (SYNC, ASYNC):
            found = [run["score"] for run in row.get(kind, {}).get("runs", ()) if run["score"] is not None]
            cells = [f"not within {report['seconds']:g} s", ""]
            if found:
                cells = [f"{statistics.median(one[name] for one in found):,.0f}" for name in ("seconds", "env_steps")]
            if kind in row:
                body.append([f"{kind} K={row['envs']}", f"{row[kind]['eps']:.3g}", *cells])
    return ["", f"until the mean return of 100 episodes is {report['score']:g}:", *columns(body, 20)]
