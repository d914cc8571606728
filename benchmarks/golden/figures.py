"""Measures the cost of an environment step: processor time of all roles, without start and end.

A run is sampled while it trains, at two of its recorded rows: the processor time of its whole process tree, including
ended children. The sides alternate (OLD NEW, NEW OLD, ...), so that a slow phase of the machine affects both.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from golden.checkout import POLL_S, TIMEOUT_S, Checkout, Row, Tell, running

WARM_UP = 0.3  # share of a run that is not measured
COST_GATE = 0.97  # cost of OLD / cost of NEW, at least
CALL_GATE = 1.10  # p50 of NEW / p50 of OLD, at most
QUIET_LOAD = 1.5 * len(
    os.sched_getaffinity(0)
)  # above it other programs use the machine; a run alone reaches about this load
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
# 97.5 % quantiles of Student's t by degrees of freedom.
STUDENT = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
LOCAL, INLINE = "--engine=local", "--engine=inline"
QUIET = ("--device=cpu", "--learner.threads=1", "--evaluation.interval-s=0", "--seed=1")


@dataclass(frozen=True)
class Training:
    """A measured training."""

    preset: str
    env: str
    steps: int
    options: tuple[str, ...]


TRAININGS = {
    "impala": Training("impala", "CartPole-v1", 600_000, (LOCAL, "--acting=local")),
    "ppo-central": Training("ppo", "CartPole-v1", 80_000, (LOCAL, "--acting=central", "--algorithm.epochs=2")),
    "apex-dqn": Training("apex-dqn", "CartPole-v1", 12_000, (LOCAL,)),
    "apex-dqn-tcp": Training("apex-dqn", "CartPole-v1", 10_000, (LOCAL, "--replay.transport=tcp")),
    "dqn-inline": Training("dqn", "CartPole-v1", 12_000, (INLINE,)),
    "sac-inline": Training("sac", "Pendulum-v1", 4_000, (INLINE,)),
}
FIGURES = (*TRAININGS, "world-call")


def tree_seconds(root: int) -> float:
    """Returns the processor time of a process and its descendants, including ended children."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry)] = int(fields[1])
        used[int(entry)] = sum(map(int, fields[11:15])) * TICK_S  # utime, stime, cutime, cstime
    members, grown = {root}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in members} - members
        members |= more
        grown = bool(more)
    return sum(used.get(pid, 0.0) for pid in members)


def step_cost(side: Checkout, name: str, number: int) -> float:
    """Returns the microseconds of processor time per environment step of the training `name`."""
    training = TRAININGS[name]
    words = ("train", training.preset, training.env, *QUIET, *training.options, f"--steps={training.steps}")
    marks: list[tuple[int, float]] = []  # environment steps, seconds used
    with running(side, f"figure-{name}-{number}", *words) as run:
        deadline = time.monotonic() + TIMEOUT_S
        while run.process.poll() is None and time.monotonic() < deadline:
            fresh = run.look()
            if fresh and WARM_UP * training.steps <= fresh[-1]["env_steps"] < training.steps:
                marks.append((fresh[-1]["env_steps"], tree_seconds(run.process.pid)))
            time.sleep(POLL_S)
        if run.wait(1.0) != 0 or len(marks) < 2:
            raise RuntimeError(f"{side.label}: {name} was not measured: {run.output.read_text()[-300:]}")
    (first_steps, first_s), (last_steps, last_s) = marks[0], marks[-1]
    return 1e6 * (last_s - first_s) / (last_steps - first_steps)


def call_time(side: Checkout, number: int) -> float:
    """Returns the median round trip of a call with 1 KB, in microseconds."""
    report = side.folder / f"world-{number}.json"
    words = ("--peer=none", "--rounds=3", "--seconds=0.7", "--small=1024", "--large=65536", f"--output={report}")
    finished = side.echelon("bench", "world", *words)
    if finished.code != 0:
        raise RuntimeError(f"{side.label}: bench world: exit code {finished.code}: {finished.tail}")
    measures = {one["name"]: one for one in json.loads(report.read_text())["measures"]}
    return float(measures["small round trip p50"]["by"]["echelon"]["median"])


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % confidence interval of the mean of the logarithms (Student's t)."""
    if len(ratios) < 2:
        return 0.0, math.inf
    logs = [math.log(ratio) for ratio in ratios]
    quantile = STUDENT[min(len(logs) - 1, len(STUDENT) - 1)]
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(statistics.mean(logs) - half), math.exp(statistics.mean(logs) + half)


def compare(old: Checkout, new: Checkout, tell: Tell, names: Sequence[str], pairs: int) -> Iterator[Row]:
    for name in names:
        if (load := os.getloadavg()[0]) > QUIET_LOAD:
            tell(
                f"figures: the load is {load:.1f}: other programs are running, so small differences are not significant"
            )
        yield _compared(old, new, tell, name, pairs)


def _compared(old: Checkout, new: Checkout, tell: Tell, name: str, pairs: int) -> Row:
    costs: dict[str, list[float]] = {old.label: [], new.label: []}
    for pair in range(pairs):
        for side in (old, new) if pair % 2 == 0 else (new, old):
            try:
                cost = call_time(side, pair) if name == "world-call" else step_cost(side, name, pair)
            except RuntimeError as error:
                return Row("figures", name, "differs", note=str(error))
            costs[side.label].append(cost)
            tell(f"figures: {name}: pair {pair + 1} of {pairs}: {side.label} {cost:,.1f} µs")
    ratios = [a / b for a, b in zip(costs[old.label], costs[new.label], strict=True)]
    ratio, (low, high) = statistics.median(ratios), interval(ratios)
    is_good = ratio >= (1 / CALL_GATE if name == "world-call" else COST_GATE)
    within = f" (95 %: {low:.3f} to {high:.3f})" if pairs > 1 else " (one pair: no interval)"
    unit = "µs a call, p50" if name == "world-call" else "µs a step"
    old_text, new_text = (f"{statistics.median(costs[side.label]):,.1f} {unit}" for side in (old, new))
    note = f"OLD / NEW = {ratio:.3f}{within}"
    tell(f"figures: {name}: {note}")
    return Row("figures", name, "same" if is_good else "differs", old_text, new_text, note)
