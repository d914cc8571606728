"""Trains presets on environments of the zoo with several seeds, and reports the greedy returns that they reach:

    python benchmarks/zoo.py [--only ppo:CartPole-v1,dqn] [--seeds 10-14] [--jobs 1] [--out FILE] [--record]

Each run is the plain command `echelon train PRESET ENV --steps N --seed S`, without evaluation during training, and
then `echelon eval` with the last weights. A task has a goal, which the median over the seeds must reach; every seed
must reach 90 % of it. The goals are the returns of the zoo of stable-baselines3. A run stops at the end of a batch:
--steps is lower than the steps of the task by 1 % and a batch, so it never has more.
FrozenLake-v1 (0.7) and Blackjack-v1 (-0.06, over 10,000 episodes, as its returns vary widely) have goals near their
optimum. Recall (echelon.envs.recall) needs memory: its best return is 1, and chance is 0. Options after -- go to
every training, to try other values. `--record` writes the returns into src/echelon/presets/results.json, which `echelon
presets` shows: those of the plain command alone, with the seeds of all records.
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

from echelon.presets import preset

RESULTS = Path(__file__).parent.parent / "src" / "echelon" / "presets" / "results.json"
SHARE = 0.9  # of the goal, that every seed must reach
SEEDS = list(range(10, 15))  # not those that values were tuned with
MEMORY = ["--network.core", "gru", "--network.core-size", "32", "--actors", "1", "--actor.trajectory", "64"]
RECALL = ["--algorithm.minibatches", "4", "--optimizer.learning-rate", "1e-3", "--actor.total-envs", "16"]


@dataclass(frozen=True)
class Task:
    """A preset, an environment, the steps of a run, and the return that it must reach."""

    preset: str
    env: str
    steps: int
    goal: float
    episodes: int = 100  # greedy ones, after the training
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.preset}:{self.env}"

    @property
    def least(self) -> float:
        """The return that every seed must reach."""
        return self.goal * SHARE if self.goal > 0 else self.goal / SHARE


TASKS = [
    Task("ppo", "CartPole-v1", 100_000, 500),
    Task("ppo", "Acrobot-v1", 1_000_000, -73.5),
    Task("ppo", "MountainCarContinuous-v0", 20_000, 88),
    Task("ppo", "Pendulum-v1", 100_000, -172),
    Task("ppo", "LunarLanderContinuous-v3", 1_000_000, 271),
    Task("ppo", "FrozenLake-v1", 300_000, 0.7, 1_000),
    Task("ppo", "Blackjack-v1", 500_000, -0.06, 10_000),
    Task("dqn", "CartPole-v1", 50_000, 500),
    Task("qr-dqn", "CartPole-v1", 50_000, 500),
    Task("dqn", "Acrobot-v1", 100_000, -76.6),
    Task("qr-dqn", "Acrobot-v1", 100_000, -69.1),
    Task("sac", "Pendulum-v1", 20_000, -157),
    Task("td3", "Pendulum-v1", 20_000, -152),
    Task("sac", "MountainCarContinuous-v0", 50_000, 94.7),
    Task("td3", "MountainCarContinuous-v0", 300_000, 93.5),
    Task("impala", "CartPole-v1", 500_000, 500),
    Task("impala", "Acrobot-v1", 500_000, -83),
    Task("a3c", "CartPole-v1", 500_000, 500),
    Task("a3c", "Acrobot-v1", 500_000, -83),
]
LONG = [  # run only if named
    Task("dqn", "LunarLander-v3", 100_000, 154),
    Task("dqn", "MountainCar-v0", 120_000, -100.8),
    Task("ppo", "BipedalWalker-v3", 5_000_000, 213),
    Task("sac", "BipedalWalker-v3", 500_000, 298),
    Task("ppo", "echelon.envs.recall:Recall", 300_000, 0.95, options=(*MEMORY, *RECALL)),
]


def run(task: Task, seed: int, engine: str, options: list[str]) -> dict[str, Any]:
    """Runs one training and its evaluation; returns the result."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="echelon-zoo-") as folder:
        run_dir = str(Path(folder, "run"))
        chosen = [*task.options, "--engine", engine, "--seed", str(seed), "--evaluation.episodes", "0", *options]
        steps = [] if "--steps" in options else ["--steps", str(steps_of(task))]
        echelon("train", task.preset, task.env, *steps, *chosen, "--run-dir", run_dir)
        trained_s = time.perf_counter() - began
        summary = json.loads(Path(run_dir, "summary.json").read_text())
        score = json.loads(echelon("eval", run_dir, "--episodes", str(task.episodes), "--json"))
    return {
        "task": task.name,
        "seed": seed,
        "return": score["return_mean"],
        "training_return": summary["return_mean"],
        "env_steps": summary["env_steps"],
        "seconds": round(trained_s, 1),
    }


def steps_of(task: Task) -> int:
    """Returns the --steps of a run, which may end a batch later."""
    config = preset(task.preset, task.env)
    batch = config.batch_trajectories * config.actor.trajectory * config.actor.envs_per_actor
    return int(0.99 * task.steps) - batch


def echelon(*arguments: str) -> str:
    """Runs an echelon command; returns its output."""
    command = [sys.executable, "-m", "echelon.cli.main", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with code {process.returncode}:\n{process.stderr}")
    return process.stdout


def line(task: Task, results: list[dict[str, Any]]) -> str:
    """Returns one line of the table."""
    returns = sorted(result["return"] for result in results)
    median = statistics.median(returns)
    reached = "yes" if median >= task.goal and returns[0] >= task.least else "NO"
    shown = ", ".join(f"{value:.4g}" for value in returns)
    steps, seconds = max(r["env_steps"] for r in results), statistics.median(r["seconds"] for r in results)
    cells = [task.preset, task.env, f"{steps:,}", f"{task.goal:g}", f"{median:.4g}", reached, shown, f"{seconds:.0f}"]
    return f"| {' | '.join(cells)} |"


def record(tasks: list[Task], results: list[dict[str, Any]]) -> None:
    """Replaces the results of `tasks` in results.json."""
    rows = {f"{row['preset']}:{row['env']}": row for row in json.loads(RESULTS.read_text())}
    for task in tasks:
        mine = sorted((r for r in results if r["task"] == task.name), key=lambda r: r["seed"])
        rows[task.name] = {
            "preset": task.preset,
            "env": task.env,
            "steps": max(r["env_steps"] for r in mine),
            "seeds": [r["seed"] for r in mine],
            "returns": [round(r["return"], 3) for r in mine],
        }
    lines = ",\n".join(json.dumps(row) for row in rows.values())
    RESULTS.write_text(f"[\n{lines}\n]\n")


def seeds_of(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main() -> None:
    words = sys.argv[1:]
    words, options = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="PRESET, ENV or PRESET:ENV, comma-separated (all but the long ones)")
    parser.add_argument("--seeds", type=seeds_of, default=SEEDS, help="FIRST-LAST")
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs")
    parser.add_argument("--engine", default="local")
    parser.add_argument("--out", default="", help="file for JSON lines with every run")
    parser.add_argument("--record", action="store_true", help="write the returns into the package")
    known = parser.parse_args(words)
    names = [name for name in known.only.split(",") if name]
    tasks = [task for task in [*TASKS, *LONG] if {task.preset, task.env, task.name} & {*names}] if names else TASKS
    if known.record and (options or known.seeds != SEEDS or any(task.options for task in tasks)):
        parser.error("--record stores what the plain command reaches with seeds 10-14. Remove the options, or --record")
    jobs = [(task, seed) for task in tasks for seed in known.seeds]
    results: list[dict[str, Any]] = []

    def work(job: tuple[Task, int]) -> None:
        result = run(*job, known.engine, options)
        results.append(result)
        print(f"[{len(results)}/{len(jobs)}] {json.dumps(result)}", file=sys.stderr, flush=True)
        if known.out:
            with open(known.out, "a") as file:
                file.write(json.dumps(result) + "\n")

    os.environ.setdefault("OMP_NUM_THREADS", "1") if known.jobs > 1 else None
    with ThreadPoolExecutor(known.jobs) as pool:
        list(pool.map(work, jobs))
    print("| preset | environment | steps | goal | median | reached | returns | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for task in tasks:
        print(line(task, [result for result in results if result["task"] == task.name]))
    if known.record:
        record(tasks, results)


if __name__ == "__main__":
    main()
