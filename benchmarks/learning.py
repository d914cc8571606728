"""Does it learn? Every preset on every task over several seeds, in one command:

    python benchmarks/learning.py [--presets ppo,impala] [--tasks cartpole,...] [--seeds 5] [--jobs 2] [--out FILE]

A run solves its task when the mean return of its last 100 training episodes (stochastic policy) reaches the threshold
within the step budget. Thresholds: CartPole-v1 475 and Acrobot-v1 -100 are gymnasium's own (reward_threshold);
LunarLander's is gymnasium's 200; Pendulum-v1 has none, -200 is what the field counts as solved; Recall's best is 1 and
chance is 0. `recall-feedforward` is the control: without memory nothing beats chance.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Task:
    """An environment, what counts as solved, and what each preset sets for it."""

    env: str
    threshold: float
    steps: dict[str, int]  # budget by preset
    options: dict[str, list[str]]  # by preset
    solvable: bool = True


CONTINUOUS = ["--env-kwargs", '{"continuous": true}']
SMALL = ["--actors", "1", "--envs-per-actor", "16"]
NORMALIZED = ["--algorithm.normalize-reward", "true", "--algorithm.normalize-advantage", "true"]
FAR_SIGHTED = [
    *["--algorithm.discount", "0.999", "--algorithm.normalize-reward", "true", "--network.initial-log-std", "-1"],
]
MEMORY = ["--network.core", "gru", "--network.core-size", "32", *SMALL, "--actor.trajectory", "64"]
RECALL = {
    "impala": ["--optimizer.learning-rate", "4e-3"],
    "ppo": ["--optimizer.learning-rate", "1e-3", "--algorithm.minibatches", "4"],
}
TASKS = {
    "cartpole": Task("CartPole-v1", 475, {"impala": 2_000_000, "ppo": 500_000}, {}),
    "acrobot": Task("Acrobot-v1", -100, {"impala": 1_000_000, "ppo": 300_000}, {}),
    "pendulum": Task(
        "Pendulum-v1",
        -200,
        {"impala": 1_500_000, "ppo": 300_000},
        {
            "impala": [
                *SMALL,
                *NORMALIZED,
                *["--algorithm.discount", "0.9", "--algorithm.trace-lambda", "0.95"],
                *["--algorithm.entropy-weight", "0", "--optimizer.learning-rate", "1e-3"],
            ],
            "ppo": [*NORMALIZED, "--algorithm.discount", "0.95", "--optimizer.learning-rate", "1e-3"],
        },
    ),
    "lunarlander": Task(
        "LunarLander-v3",
        200,
        {"impala": 2_000_000, "ppo": 1_500_000},
        {
            "impala": [
                *[*CONTINUOUS, *FAR_SIGHTED, "--algorithm.trace-lambda", "0.98", "--actor.trajectory", "128"],
                *["--envs-per-actor", "8", "--algorithm.minibatches", "16", "--algorithm.entropy-weight", "0"],
                *["--optimizer.learning-rate", "3e-4", "--network.initial-log-std", "-1.5"],
            ],
            "ppo": [*CONTINUOUS, *FAR_SIGHTED, "--algorithm.gae-lambda", "0.98"],
        },
    ),
    "recall": Task(
        "echelon.envs.recall:Recall",
        0.95,
        {"impala": 1_500_000, "ppo": 300_000},
        {name: [*MEMORY, *options] for name, options in RECALL.items()},
    ),
    "recall-feedforward": Task(
        "echelon.envs.recall:Recall",
        0.95,
        {"impala": 600_000, "ppo": 200_000},
        {name: [*SMALL, "--actor.trajectory", "64", *options] for name, options in RECALL.items()},
        solvable=False,
    ),
}


def run(preset: str, name: str, seed: int, engine: str) -> dict[str, Any]:
    """One training; what it came to."""
    task = TASKS[name]
    with tempfile.TemporaryDirectory(prefix="echelon-learning-") as folder:
        command = [
            *[sys.executable, "-m", "echelon.cli.main", "train", preset, task.env, *task.options.get(preset, [])],
            *["--engine", engine, "--seed", str(seed), "--until-return", str(task.threshold)],
            *["--steps", str(task.steps[preset]), "--run-dir", f"{folder}/run", "--evaluation.interval-s", "0"],
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = time.monotonic()
        process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        seconds = time.monotonic() - started
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}\nended with code {process.returncode}:\n{process.stderr}")
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    keys = ("status", "env_steps", "return_mean", "env_steps_per_s")
    return {"preset": preset, "task": name, "seed": seed, "seconds": seconds, **{key: summary[key] for key in keys}}


def row(preset: str, name: str, results: list[dict[str, Any]]) -> str:
    """One line of the table: how many solved it, and the median and worst of their steps and seconds."""
    solved = [result for result in results if result["status"] == "solved"]
    returns = ", ".join(f"{result['return_mean']:.4g}" for result in results)
    if not TASKS[name].solvable:
        mean = statistics.mean(result["return_mean"] for result in results)
        return f"| {preset} | {name} | stays at chance | {mean:.3g} mean return | | {returns} |"
    steps = [result["env_steps"] for result in solved] or [0]
    seconds = [result["seconds"] for result in solved] or [0.0]
    return (
        f"| {preset} | {name} ≥ {TASKS[name].threshold:g} | {len(solved)} of {len(results)} | "
        f"{statistics.median(steps):,.0f} ({max(steps):,}) | {statistics.median(seconds):.0f} ({max(seconds):.0f}) | "
        f"{returns} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="ppo,impala")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs side by side")
    parser.add_argument("--engine", default="inline", help="inline repeats exactly; local uses processes")
    parser.add_argument("--out", default="", help="JSON lines with every run")
    known = parser.parse_args()
    pairs = [(preset, task) for task in known.tasks.split(",") for preset in known.presets.split(",")]
    jobs = [(preset, task, seed) for preset, task in pairs for seed in range(known.seeds)]
    results: list[dict[str, Any]] = []

    def work(job: tuple[str, str, int]) -> None:
        result = run(*job, known.engine)
        results.append(result)
        print(f"[{len(results)}/{len(jobs)}] {json.dumps(result)}", file=sys.stderr, flush=True)
        if known.out:
            with open(known.out, "a") as file:
                file.write(json.dumps(result) + "\n")

    with ThreadPoolExecutor(known.jobs) as pool:
        list(pool.map(work, jobs))
    print("| preset | task | solved | steps, median (worst) | seconds, median (worst) | final returns |")
    print("|---|---|---|---|---|---|")
    for preset, task in pairs:
        chosen = [result for result in results if (result["preset"], result["task"]) == (preset, task)]
        print(row(preset, task, sorted(chosen, key=lambda result: result["seed"])))


if __name__ == "__main__":
    main()
