"""Compares local and central acting on this machine, and checks whether `--acting auto` picks the faster one.

    python benchmarks/acting.py [--only cartpole pong sleepy large] [--pairs 2] [--seconds 15] [--json FILE]
    python benchmarks/acting.py --learning [--seeds 5]

A pair is four trainings in the order local, central, central, local, so that a machine that becomes slower or faster
favours neither; before each pair the choice of `auto` is recorded. Rates are those of the second half of a training.
The output includes the processor time per step, by role, and the cores that other programs used: if that is more than
0.1, repeat the benchmark on an idle machine.

`--learning` trains IMPALA on CartPole-v1 until the mean return of the last 100 episodes is 475, with several seeds and
both kinds of acting, and compares the number of environment steps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from echelon.bench.harness import in_turns
from echelon.bench.watch import Usage, UsageWatch, usage
from peers import foreign_cpu_s, progress_points
from steady import steady_rate

HERE = Path(__file__).resolve().parent
MODES = ("local", "central")
START_ALLOWANCE_S = 180.0  # for starting and ending processes, before a training counts as hung
DISTURBED_CORES = 0.1
CORES = len(os.sched_getaffinity(0))
TARGET, MAX_STEPS = 475, 3_000_000


@dataclass(frozen=True, slots=True)
class Task:
    """A training: IMPALA with two actors on `env`."""

    env: str
    envs: int  # per actor
    options: tuple[str, ...] = ()
    factor: float = 1.0  # of the duration: slow trainings need more time


TASKS = {
    "cartpole": Task("CartPole-v1", 32),
    "pong": Task("ALE/Pong-v5", 8),
    "sleepy": Task(
        f"{HERE / 'sleepy.py'}:Sleepy", 8, ("--actor.trajectory", "5")
    ),  # short trajectories, for frequent batches
    # 20 M parameters.
    "large": Task("CartPole-v1", 32, ("--network.hidden", "3150,3150", "--actor.trajectory", "10"), 3.0),
}


@dataclass(slots=True)
class Row:
    """The results of the trainings of one task, in order."""

    picks: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    rates: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    roles_us: dict[str, list[dict[str, float]]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    foreign_cores: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)

    @property
    def medians(self) -> dict[str, float]:
        return {mode: median(rates) for mode, rates in self.rates.items()}

    @property
    def loss(self) -> float:
        """Returns the loss of the worst pick relative to the faster acting, as a share of its rate."""
        rates = self.medians
        return 1.0 - min(rates[pick] for pick in self.picks) / max(rates.values())


def train(task: Task, mode: str, options: list[str], run: Path, seconds: float) -> str:
    """Runs one training; returns its output."""
    command = [
        *[sys.executable, "-m", "echelon.cli.main", "train", "impala", task.env, "--acting", mode],
        *["--actors", "2", "--envs-per-actor", str(task.envs), "--run-dir", str(run)],
        *["--evaluation.episodes", "0", *task.options, *options],
    ]
    limit_s = seconds + START_ALLOWANCE_S
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s, cwd=HERE.parent)
    if process.returncode:
        sys.exit(f"{' '.join(command)}\nended with code {process.returncode}:\n{process.stdout}{process.stderr}")
    return process.stdout


def pick(task: Task, row: Row) -> None:
    """Records the choice of `auto` and its reason."""
    with tempfile.TemporaryDirectory(prefix="echelon-acting-") as folder:
        printed = train(task, "auto", ["--steps", "1"], Path(folder, "run"), 0.0)
    [line] = [line for line in printed.splitlines() if line.startswith("acting: ")]
    mode, _, reason = line.removeprefix("acting: ").partition(" ")
    row.picks.append(mode)
    row.reasons.append(reason)
    print(f"  {line}", flush=True)


def measure(task: Task, mode: str, seconds: float, row: Row) -> None:
    """Trains once and adds the rate to `row`."""
    seconds *= task.factor
    started_s, foreign_s, load = time.monotonic(), foreign_cpu_s(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="echelon-acting-") as folder:
        run = Path(folder, "run")
        watch = UsageWatch(run, lambda text: None)
        watch.start()
        train(task, mode, ["--minutes", f"{seconds / 60:.4f}"], run, seconds)
        watch.stop()
        points = advances(progress_points(run))
        if len(points) < 2:
            sys.exit(f"{mode} acting on {task.env} made {len(points)} batches in {seconds:g} s. Use more --seconds.")
        rate = steady_rate(points)
    foreign_cores = (foreign_cpu_s() - foreign_s) / (time.monotonic() - started_s)
    used = usage(watch.samples, CORES, whole_machine=True)
    row.rates[mode].append(rate)
    row.roles_us[mode].append(used.roles_us if used else {})
    row.foreign_cores.append(foreign_cores)
    row.loads.append(load)
    disturbed = f", DISTURBED: others used {foreign_cores:.2f} cores" if foreign_cores > DISTURBED_CORES else ""
    print(f"  {mode:8}{rate:>10,.0f} steps/s{told(used)}, load before {load:.1f}{disturbed}", flush=True)


def advances(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Returns the points with new steps: batches are rare if steps are slow."""
    return [point for point, (_, before) in zip(points[1:], points, strict=False) if point[1] > before]


def told(used: Usage | None) -> str:
    """Returns the processor time per step, by role, as text."""
    if used is None:
        return ""
    roles = ", ".join(f"{kind} {us:.1f}" for kind, us in used.roles_us.items() if us >= 0.1)
    return f", a step took {sum(used.roles_us.values()):.1f} us ({roles}) and {used.idle_us:.1f} idle"


def table(rows: dict[str, Row]) -> str:
    head = f"{'':10}{'local':>10}{'central':>10}{'central/local':>15}{'auto picks':>16}{'loses':>8}{'disturbed':>11}"
    lines = [head]
    for name, row in rows.items():
        rates = row.medians
        picks = ", ".join(f"{mode} {row.picks.count(mode)}/{len(row.picks)}" for mode in dict.fromkeys(row.picks))
        disturbed = sum(cores > DISTURBED_CORES for cores in row.foreign_cores)
        lines.append(
            f"{name:10}{rates['local']:>10,.0f}{rates['central']:>10,.0f}{rates['central'] / rates['local']:>15.2f}"
            f"{picks:>16}{row.loss:>8.1%}{f'{disturbed}/{len(row.foreign_cores)}':>11}"
        )
    return "\n".join(lines)


def compare_rates(names: list[str], pairs: int, seconds: float) -> dict[str, Any]:
    """Runs the pairs of trainings of every task; returns the table as data."""
    rows = {name: Row() for name in names}
    for number in range(pairs):
        for name, row in rows.items():
            print(f"{name}, pair {number + 1} of {pairs}", flush=True)
            pick(TASKS[name], row)
            for mode in (*MODES, *reversed(MODES)):
                measure(TASKS[name], mode, seconds, row)
    print(f"\n{table(rows)}")
    results = {name: {**asdict(row), "medians": row.medians, "loss": row.loss} for name, row in rows.items()}
    return {"seconds": seconds, "pairs": pairs, "tasks": results}


def steps_to_target(mode: str, seed: int) -> int:
    """Returns the environment steps until CartPole counts as solved."""
    with tempfile.TemporaryDirectory(prefix="echelon-acting-") as folder:
        options = ["--seed", str(seed), "--until-return", str(TARGET), "--steps", str(MAX_STEPS)]
        train(TASKS["cartpole"], mode, options, Path(folder, "run"), 600.0)
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    if summary["status"] != "solved":
        sys.exit(f"{mode} acting, seed {seed}: {summary['return_mean']} after {summary['env_steps']:,} steps")
    steps: int = summary["env_steps"]
    return steps


def compare_learning(seeds: int) -> dict[str, Any]:
    """Compares the steps to the target with both kinds of acting."""
    steps: dict[str, list[int]] = {mode: [] for mode in MODES}
    for seed, mode in in_turns(MODES, seeds):
        steps[mode].append(steps_to_target(mode, seed))
        print(f"  seed {seed}, {mode:8}{steps[mode][-1]:>12,} steps to {TARGET}", flush=True)
    medians = {mode: median(counts) for mode, counts in steps.items()}
    ratio = medians["central"] / medians["local"]
    print(f"\nmedian steps to {TARGET}: local {medians['local']:,}, central {medians['central']:,} ({ratio:.2f} times)")
    return {"steps": steps, "medians": medians, "ratio": ratio}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS), help="run only these")
    parser.add_argument("--pairs", type=int, default=2, help="pairs per task, four trainings each (default 2)")
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="duration of each training, including the start (default 15)"
    )
    parser.add_argument(
        "--learning", action="store_true", help="compare the steps to a target return, not steps per second"
    )
    parser.add_argument("--seeds", type=int, default=5, help="seeds of --learning (default 5)")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    options = parser.parse_args()
    if options.pairs < 1 or options.seeds < 1 or options.seconds < 5:
        parser.error("--pairs and --seeds must be at least 1, and --seconds at least 5.")
    if options.learning:
        result = compare_learning(options.seeds)
    else:
        result = compare_rates(options.only, options.pairs, options.seconds)
    if options.json:
        machine = {"cores": CORES, "python": platform.python_version()}
        options.json.write_text(json.dumps({"machine": machine, **result}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
