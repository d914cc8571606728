"""Measures what lag costs PPO in samples: steps until a score, for each `algorithm.lag_correction`, at an exact lag.

    python benchmarks/lag.py [--tasks cartpole,pendulum] [--lags 1,4,8] [--seeds 20] [--jobs 2] [--out lag.json]
    python benchmarks/lag.py --tasks cartpole --lags 4 --seeds 2 --limit 20000     # a minute, to try it
    python benchmarks/lag.py --from lag.json --picture lag.png                     # shows a report again

Every run has one process with one thread: a group of environments, the actor's policy, and the learner's model and
optimizer. The learner at version v learns from a batch that was chosen with the weights of version v - lag (version 0
at the start), so the lag is exact and does not depend on the speed of the machine. A version has one batch of 2,048
steps (16 environments, 128 steps each). `TASKS` has the other settings, which do not follow the presets, so that
results stay comparable. `sync` is plain PPO at lag 0.

A run ends when the mean return of its last 100 training episodes reaches the score. These episodes are played with
weights that are `lag` versions old, so a run at lag k needs k batches more than its learner to show the same score;
they are counted. A run that does not reach the score within the limit, or diverges, counts as the limit (censored).

Writes the settings and every run as JSON. Prints the median steps to the score, and their ratio to the median of sync
with a 95 % interval (percentile bootstrap over the seeds of both). `--picture` draws the learning curves.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from echelon.algorithms.model import Model, Policy
from echelon.config import (
    ActorConfig,
    EnvConfig,
    LearnerConfig,
    NetworkConfig,
    OptimizerConfig,
    StopConfig,
    TrainConfig,
    replace,
)
from echelon.config_io import set_fields, to_json
from echelon.envs.make import env_seeds, make_group, probe_spaces
from echelon.presets.ppo import LagCorrection, PpoConfig
from echelon.roles.actor import LocalActing
from echelon.roles.experience import SlotRows, Team
from echelon.roles.loss_account import LossAccount
from echelon.roles.queue_source import Staging
from echelon.roles.source import Counters
from echelon.roles.stopping import stop_reason
from echelon.roles.update import ModelTrainable
from echelon.runs.checkpoint import weights_sha256
from echelon.schema import TrajectorySchema

Array = np.ndarray[Any, Any]
Run = dict[str, Any]
CORRECTIONS: tuple[str, ...] = get_args(LagCorrection)
SYNC = "sync"  # plain PPO at lag 0
COLORS = ("#5f6670", "#e08a2e", "#1f5fa8", "#4f9a68")  # of sync and of CORRECTIONS
SETTINGS = TrainConfig(
    preset="ppo",
    actor=ActorConfig(num_actors=1, envs=16, trajectory=128),
    learner=LearnerConfig(max_lag=0),
    network=NetworkConfig(),
    algorithm=PpoConfig(epochs=10, minibatches=8),
    optimizer=OptimizerConfig(learning_rate=5e-4),
)


@dataclass(frozen=True)
class Task:
    """An environment, the score to reach, the limit in steps, and what differs from SETTINGS."""

    env: str
    score: float
    limit: int
    changes: dict[str, Any]


TASKS = {
    "cartpole": Task("CartPole-v1", 475, 500_000, {"env.vector": "vector_entry_point"}),
    "pendulum": Task(
        "Pendulum-v1",
        -200,
        300_000,
        {"algorithm.discount": 0.95, "algorithm.normalize_reward": True, "optimizer.learning_rate": 1e-3},
    ),
}


@dataclass(frozen=True)
class Job:
    """One run."""

    task: str
    correction: str
    lag: int
    seed: int
    limit: int  # in environment steps
    fields: dict[str, str]  # that differ from those of the task


class DelayedBoard:
    """A weights board of one process that yields the weights of `lag` versions ago, at first those of version 0."""

    def __init__(self, lag: int, parts: Sequence[Array]) -> None:
        self.history = collections.deque[Array](maxlen=lag + 1)
        self.newest = -1
        self.publish(parts)

    def publish(self, parts: Sequence[Array]) -> None:
        self.history.append(np.concatenate([part.reshape(-1).view(np.uint8) for part in parts]))
        self.newest += 1

    @property
    def version(self) -> int:
        return self.newest + 1 - len(self.history)

    def read(self, out: Array) -> int:
        out[:] = self.history[0]
        return self.version


class Collector:
    """One group of environments and the policy that acts in it: collects one batch at a time."""

    def __init__(self, config: TrainConfig, board: DelayedBoard) -> None:
        *seeds, acting_seed = env_seeds(config.seed, 0, 0, config.actor.envs + 1)
        group = make_group(config.env, seeds)
        model = Model(config.network, group.spaces, config.algorithm, seed=config.seed)
        schema = TrajectorySchema(group.spaces, config.actor.trajectory, len(seeds), model.network.state_shapes)
        self.slot = schema.views(np.zeros(schema.nbytes, np.uint8))
        self.team = Team(0, group, slice(None), [SlotRows(schema, self.slot, slice(None))], 0)
        self.team.reset()
        self.acting = LocalActing(Policy(model), board, len(seeds), acting_seed)
        self.staging = Staging(schema, 1, model.device)
        self.distribution = model.distribution

    def collect(self) -> Staging:
        team, acting = self.team, self.acting
        acting.begin(0)
        page = team.enter()
        for t, row in enumerate(page.rows):
            acting.submit(0, row.request)
            reply = acting.collect(0)
            if t == 0:
                for target, source in zip(page.state, acting.state_before(0), strict=True):
                    target[...] = source
            row.action[...] = reply.action
            row.log_prob[...] = reply.log_prob
            row.version[0] = reply.version
            team.group.step(self.distribution.to_env(reply.action), row.step)
            np.logical_not(row.step.valid, out=row.next_first)
        team.leave()
        self.staging.put(0, 0, self.slot)
        return self.staging


def config_of(job: Job) -> TrainConfig:
    """Returns the configuration of a run."""
    task = TASKS[job.task]
    correction = "none" if job.correction == SYNC else job.correction
    changes = {"env": EnvConfig(id=task.env), "algorithm.lag_correction": correction, "seed": job.seed}
    return set_fields(replace(replace(SETTINGS, **changes), **task.changes), job.fields)


def run(job: Job) -> Run:
    """Trains until the score or the limit; returns the steps, the learning curve and the means of the metrics."""
    config, start = config_of(job), time.process_time()
    stop = StopConfig(steps=job.limit, until_return=TASKS[job.task].score)
    model = Model(config.network, probe_spaces(config.env), config.algorithm, seed=config.seed)
    trainable = ModelTrainable(config, model)
    board = DelayedBoard(job.lag, trainable.parts())
    collector, counters, account = Collector(config, board), Counters(), LossAccount()
    curve: list[tuple[int, float]] = []
    diverged = ""
    while not (reason := stop_reason(stop, counters.env_steps, counters.returns, 0.0)):
        staging = collector.collect()
        arrays = staging.arrays
        assert (board.newest - arrays["version"] == min(job.lag, board.newest)).all(), "the lag is exact"
        counters.env_steps += int(arrays["valid"].sum())
        ended = arrays["episode_length"].nonzero()
        counters.note_episodes(arrays["episode_return"][ended].tolist(), arrays["episode_length"][ended].tolist())
        trainable.learn(staging.batch, account, lambda: None, None)
        account.close_batch(board.newest + 1)
        if diverged := account.find_non_finite():
            break
        board.publish(trainable.parts())
        if counters.return_mean is not None:
            curve.append((counters.env_steps, round(counters.return_mean, 2)))
    steps = min(counters.env_steps, job.limit) if reason else job.limit
    found = {"reached": reason == "return", "diverged": diverged, "env_steps": steps, "curve": curve}
    metrics = {name: round(value, 6) for name, value in account.take().items()}
    found |= {"weights_sha256": weights_sha256(trainable.weights()), "metrics": metrics}
    return {**asdict(job), **found, "cpu_s": round(time.process_time() - start, 2)}


@dataclass(frozen=True)
class Ratio:
    """The median steps of some runs relative to those of others, with a 95 % interval."""

    median: float
    ratio: float
    low: float
    high: float
    reached: int
    runs: int

    @property
    def text(self) -> str:
        """The ratio and its interval; half of the runs or more are censored: a lower bound."""
        sign = "" if 2 * self.reached > self.runs else "≥ "
        missed = "" if self.reached == self.runs else f", {self.runs - self.reached} missed"
        return f"{sign}{self.ratio:.2f} ({self.low:.2f} to {self.high:.2f}{missed})"


def compare(runs: list[Run], sync: list[Run], num_samples: int = 10_000) -> Ratio:
    """Returns the ratio of the medians; seeds are resampled independently of each other in both groups."""
    draw = np.random.default_rng(0)
    steps, base = (np.array([one["env_steps"] for one in group], float) for group in (runs, sync))
    medians = [np.median(draw.choice(each, (num_samples, len(each))), 1) for each in (steps, base)]
    low, high = np.percentile(medians[0] / medians[1], (2.5, 97.5))
    median = float(np.median(steps))
    reached = sum(one["reached"] for one in runs)
    return Ratio(median, median / float(np.median(base)), float(low), float(high), reached, len(runs))


def select(runs: list[Run], task: str, correction: str, lag: int) -> list[Run]:
    chosen = [one for one in runs if (one["task"], one["correction"], one["lag"]) == (task, correction, lag)]
    return sorted(chosen, key=lambda one: one["seed"])


def table(runs: list[Run], task: str) -> str:
    """Returns the table of a task in Markdown."""
    lags = sorted({one["lag"] for one in runs} - {0})
    sync = select(runs, task, SYNC, 0)
    base = compare(sync, sync)
    lines = [f"| {TASKS[task].env} | {' | '.join(f'lag {lag}' for lag in lags)} |", "|---|" + "---|" * len(lags)]
    for correction in CORRECTIONS:
        groups = [select(runs, task, correction, lag) for lag in lags]
        cells = [compare(group, sync).text if group else "" for group in groups]
        lines.append(f"| {correction} | {' | '.join(cells)} |")
    missed = base.runs - base.reached
    text = f"sync: median {base.median:,.0f} steps to {TASKS[task].score:g}, {base.runs} seeds, {missed} missed"
    return "\n".join([*lines, "", text])


def band(runs: list[Run], steps: Array) -> Array:
    """Returns the quartiles of the returns at each of `steps`; a run that has ended keeps its last return."""
    curves = [np.array(one["curve"]).T for one in runs]
    returns = [np.interp(steps, curve[0], curve[1]) for curve in curves]
    quartiles: Array = np.percentile(returns, (25, 50, 75), axis=0)
    return quartiles


def draw(runs: list[Run], path: Path) -> None:
    """Draws the median and the quartiles of the returns: a row of panels per task, a panel per lag."""
    from matplotlib.figure import Figure

    tasks, lags = list(dict.fromkeys(one["task"] for one in runs)), sorted({one["lag"] for one in runs} - {0})
    size = (3.6 * len(lags), 2.9 * len(tasks) + 0.5)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    panels = figure.subplots(len(tasks), len(lags), squeeze=False, sharey="row", sharex="row")
    for task, row in zip(tasks, panels, strict=True):
        for lag, axes in zip(lags, row, strict=True):
            last = max(one["env_steps"] for one in runs if one["task"] == task)
            steps = np.linspace(0, last, 200)
            groups = {SYNC: select(runs, task, SYNC, 0)}
            groups |= {name: select(runs, task, name, lag) for name in CORRECTIONS}
            for (name, group), color in zip(groups.items(), COLORS, strict=True):
                if not group:
                    continue
                low, median, high = band(group, steps)
                axes.plot(steps / 1e3, median, color=color, linewidth=1.4, label=name)
                axes.fill_between(steps / 1e3, low, high, color=color, alpha=0.15, linewidth=0)
            axes.axhline(TASKS[task].score, color=COLORS[0], linewidth=0.8, linestyle="--")
            axes.set_title(f"{TASKS[task].env}, lag {lag}", fontsize=10)
            axes.set_xlabel("thousand environment steps", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(True, linewidth=0.5, alpha=0.3)
        row[0].set_ylabel("mean return of 100 episodes", fontsize=9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.savefig(path)


def jobs_of(known: argparse.Namespace) -> list[Job]:
    """Returns the runs, seed by seed: an interrupted study has as many seeds of each setting."""
    lagging = [(name, int(lag)) for lag in known.lags.split(",") for name in known.corrections.split(",")]
    return [
        Job(task, name, lag, seed, known.limit or TASKS[task].limit, dict(known.fields))
        for seed in range(known.first_seed, known.first_seed + known.seeds)
        for task in known.tasks.split(",")
        for name, lag in [(SYNC, 0), *lagging]
    ]


def results_of(jobs: list[Job], num_processes: int) -> Iterator[Run]:
    """Runs the jobs, several at a time; yields their results in order."""
    if num_processes == 1:
        yield from map(run, jobs)
        return
    with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run, jobs)


def run_all(jobs: list[Job], num_processes: int, path: Path) -> list[Run]:
    """Runs the jobs; writes the report after each."""
    settings = {job.task: to_json(config_of(job)) for job in jobs if job.correction == SYNC}
    runs: list[Run] = []
    for result in results_of(jobs, num_processes):
        runs.append(result)
        path.write_text(json.dumps({"bench": "lag", "settings": settings, "runs": runs}) + "\n")
        shown = {name: value for name, value in result.items() if name not in ("curve", "metrics")}
        print(f"[{len(runs)}/{len(jobs)}] {json.dumps(shown)}", file=sys.stderr, flush=True)
    return runs


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--lags", default="1,4,8", help="in versions")
    parser.add_argument("--corrections", default=",".join(CORRECTIONS))
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=0, help="steps of a run, at most (default: the task's)")
    parser.add_argument(
        "--set", dest="fields", nargs=2, action="append", default=[], metavar=("FIELD", "VALUE"), help="for every run"
    )
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="concurrent runs; 1: in this process"
    )
    parser.add_argument("--out", default="lag.json", help="JSON with the settings and every run")
    parser.add_argument("--picture", default="", help="PNG with the learning curves")
    parser.add_argument("--from", dest="reports", nargs="*", default=[], help="reports to show in place of running")
    known = parser.parse_args(arguments)
    runs = [one for path in known.reports for one in json.loads(Path(path).read_text())["runs"]]
    if not runs:
        runs = run_all(jobs_of(known), known.jobs, Path(known.out))
    for task in dict.fromkeys(one["task"] for one in runs):
        print(f"{table(runs, task)}\n")
    if known.picture:
        draw(runs, Path(known.picture))


if __name__ == "__main__":
    main()
