"""Trains every preset on every task with several seeds, and reports which runs solve their task:

    python benchmarks/learning.py [--presets dqn,sac] [--tasks cartpole,...] [--seeds 5] [--jobs 2] [--out FILE]

On-policy presets (ppo, impala, a3c) solve a task when the mean return of their last 100 training episodes (stochastic
policy) reaches the threshold within the step budget; the run stops there. Presets with replay add exploration to their
policy, and on a ladder some actors explore almost always, so their training returns mean little. They train for the
whole budget and have solved the task if the mean return of 100 greedy episodes with the last weights, on unused seeds,
reaches the threshold. Their steps and seconds are those of the first evaluation that reached it: 20 greedy episodes,
started every two seconds during training. The time of an evaluation depends on the clock; what is learned does not.
Seconds count from the start of the run, including evaluations.

Thresholds: 475 for CartPole-v1, -100 for Acrobot-v1 and 200 for LunarLander (discrete for dqn, else continuous) are
gymnasium's (reward_threshold). Pendulum-v1 has none: -200 usually counts as solved, and off-policy algorithms must
reach -180. HalfCheetah-v5 has 3,000. Recall's best return is 1 and chance is 0. `recall-feedforward` is the control:
without memory no policy beats chance. Presets without a budget for a task are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.presets import REPLAY_PRESETS

EVALUATION_S, EVALUATION_EPISODES = 2.0, 20  # beside training, of presets with replay
FINAL_EPISODES = 100


@dataclass(frozen=True)
class Task:
    """An environment, the return that counts as solved, and the options of each preset."""

    env: str
    threshold: float
    steps: dict[str, int]  # budget by preset
    options: dict[str, list[str]]  # by preset
    replay_threshold: float | None = None  # a different threshold for presets with replay
    solvable: bool = True

    def wanted(self, preset: str) -> float:
        """Returns the return that counts as solved."""
        if preset in REPLAY_PRESETS and self.replay_threshold is not None:
            return self.replay_threshold
        return self.threshold


LONG = "halfcheetah"  # 15 minutes or more per seed, so it runs only if named
CONTINUOUS = ["--env-kwargs", '{"continuous": true}']
SMALL = ["--actors", "1", "--envs-per-actor", "16"]
NORMALIZED = ["--algorithm.normalize-reward", "true", "--algorithm.normalize-advantage", "true"]
FAR_SIGHTED = [
    *["--algorithm.discount", "0.999", "--algorithm.normalize-reward", "true", "--network.initial-log-std", "-1"],
]
MEMORY = ["--network.core", "gru", "--network.core-size", "32", *SMALL, "--actor.trajectory", "64"]
DISCRETE_SAC = ["--network.normalize-observation", "true"]
RECALL = {
    "impala": ["--optimizer.learning-rate", "4e-3"],
    "ppo": ["--optimizer.learning-rate", "1e-3", "--algorithm.minibatches", "4"],
}
TASKS = {
    "cartpole": Task(
        "CartPole-v1",
        475,
        {
            **{"impala": 2_000_000, "ppo": 500_000, "a3c": 1_000_000},
            **{"dqn": 30_000, "apex-dqn": 30_000, "qr-dqn": 30_000, "sac": 20_000},
        },
        {"sac": DISCRETE_SAC},
    ),
    "acrobot": Task(
        "Acrobot-v1",
        -100,
        {"impala": 1_000_000, "ppo": 300_000, "a3c": 1_000_000, "dqn": 50_000, "apex-dqn": 50_000},
        {},
    ),
    "pendulum": Task(
        "Pendulum-v1",
        -200,
        {"impala": 1_500_000, "ppo": 300_000, "a3c": 1_500_000, "ddpg": 20_000, "apex-ddpg": 20_000, "sac": 10_000},
        {
            "impala": [
                *SMALL,
                *NORMALIZED,
                *["--algorithm.discount", "0.9", "--algorithm.trace-lambda", "0.95"],
                *["--algorithm.entropy-weight", "0", "--optimizer.learning-rate", "1e-3"],
            ],
            "ppo": [*NORMALIZED, "--algorithm.discount", "0.95", "--optimizer.learning-rate", "1e-3"],
            "a3c": [*SMALL, *NORMALIZED, "--algorithm.discount", "0.9", "--algorithm.entropy-weight", "0"],
        },
        replay_threshold=-180,
    ),
    "lunarlander": Task(
        "LunarLander-v3",
        200,
        {"impala": 2_000_000, "ppo": 1_500_000, "dqn": 150_000},
        {
            "impala": [
                *[*CONTINUOUS, *FAR_SIGHTED, "--algorithm.trace-lambda", "0.98", "--actor.trajectory", "128"],
                *["--envs-per-actor", "8", "--algorithm.minibatches", "16", "--algorithm.entropy-weight", "0"],
                *["--optimizer.learning-rate", "3e-4", "--network.initial-log-std", "-1.5"],
            ],
            "ppo": [*CONTINUOUS, *FAR_SIGHTED, "--algorithm.gae-lambda", "0.98"],
        },
    ),
    LONG: Task("HalfCheetah-v5", 3_000, {"sac": 150_000}, {}),
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
    """Runs one training; returns its result."""
    task, replayed = TASKS[name], preset in REPLAY_PRESETS
    criterion = ["--until-return", str(task.wanted(preset)), "--evaluation.interval-s", "0"]
    if replayed:
        criterion = ["--evaluation.interval-s", str(EVALUATION_S), "--evaluation.episodes", str(EVALUATION_EPISODES)]
    with tempfile.TemporaryDirectory(prefix="echelon-learning-") as folder:
        run_dir = Path(folder, "run")
        options = [*task.options.get(preset, []), "--engine", engine, "--seed", str(seed), *criterion]
        echelon("train", preset, task.env, *options, "--steps", str(task.steps[preset]), "--run-dir", str(run_dir))
        summary = json.loads((run_dir / "summary.json").read_text())
        found = {"status": summary["status"], "env_steps": summary["env_steps"], "seconds": summary["wall_s"]}
        found |= {"return": summary["return_mean"], "env_steps_per_s": summary["env_steps_per_s"]}
        if replayed:
            found |= judge(run_dir, task.wanted(preset))
    return {"preset": preset, "task": name, "seed": seed, "engine": engine, **found}


def judge(run_dir: Path, threshold: float) -> dict[str, Any]:
    """Returns the greedy return of a run's last weights, and when it first reached the threshold."""
    score = json.loads(echelon("eval", str(run_dir), "--episodes", str(FINAL_EPISODES), "--json"))
    found = {"return": score["return_mean"], "status": "solved" if score["return_mean"] >= threshold else "missed"}
    for text in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(text)
        if row["kind"] == "evaluation" and row["return_mean"] >= threshold:
            return {**found, "env_steps": row["env_steps"], "seconds": row["wall_s"]}
    return found


def echelon(*arguments: str) -> str:
    """Runs an echelon command; returns its output."""
    command = [sys.executable, "-m", "echelon.cli.main", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with code {process.returncode}:\n{process.stderr}")
    return process.stdout


def row(preset: str, name: str, results: list[dict[str, Any]]) -> str:
    """Returns one line of the table: how many runs solved the task, and the median and worst steps and seconds."""
    solved = [result for result in results if result["status"] == "solved"]
    returns = ", ".join(f"{result['return']:.4g}" for result in results)
    if not TASKS[name].solvable:
        mean = statistics.mean(result["return"] for result in results)
        return f"| {preset} | {name} | stays at chance | {mean:.3g} mean return | | {returns} |"
    steps = [result["env_steps"] for result in solved] or [0]
    seconds = [result["seconds"] for result in solved] or [0.0]
    return (
        f"| {preset} | {name} ≥ {TASKS[name].wanted(preset):g} | {len(solved)} of {len(results)} | "
        f"{statistics.median(steps):,.0f} ({max(steps):,}) | {statistics.median(seconds):.0f} ({max(seconds):.0f}) | "
        f"{returns} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(["ppo", "impala", "a3c", *REPLAY_PRESETS]))
    parser.add_argument("--tasks", default=",".join(name for name in TASKS if name != LONG), help=f"all but {LONG}")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="concurrent runs")
    parser.add_argument("--engine", default="inline", help="inline is reproducible; local uses processes")
    parser.add_argument("--out", default="", help="JSON lines with every run")
    known = parser.parse_args()
    pairs = [
        (preset, task)
        for task in known.tasks.split(",")
        for preset in known.presets.split(",")
        if preset in TASKS[task].steps
    ]
    jobs = [
        (preset, task, seed)
        for preset, task in pairs
        for seed in range(known.first_seed, known.first_seed + known.seeds)
    ]
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
