"""Compares the updates per second of one and of several learners, for a learner-bound training.

The same training runs with one learner on one core, with one learner on all cores, and with several learners on one
core each, alternating; medians are reported. Every update uses the same whole batch, so the figures are comparable.
Actors need cores, too: the last columns show how long a learner waits for actors or for other learners.

    python benchmarks/learners.py                                     # 3 rounds of 20 s each
    python benchmarks/learners.py --preset ppo --envs 8               # 80 small steps for each update in place of one
    python benchmarks/learners.py --preset sac --env Pendulum-v1      # transitions in place of trajectories
    python benchmarks/learners.py --device cuda --learners 1 2        # learners that share a GPU, or have one each
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import echelon
from echelon.bench.harness import in_turns
from echelon.config import replace
from echelon.runs.metrics import read_rows
from steady import steady_rate

PHASES = ("learn", "exchange", "transfer", "wait")  # of a learner's time


def settings(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns settings with a network so large that learning dominates everything else."""
    return {
        "run.dir": str(folder / "run"),
        "stop.minutes": options.seconds / 60,
        "evaluation.episodes": 0,
        "acting.mode": "local",
        "actor.num_actors": options.actors,
        "actor.envs": options.envs,
        "network.hidden": (options.hidden, options.hidden),
        "learner.device": options.device,
        "replay.batch": 1024,
        "replay.min_size": 2_000,
        "replay.samples_per_insert": 1024.0,
    }


def measured(options: argparse.Namespace, learners: int, threads: int) -> dict[str, float]:
    """Returns the updates per second over the second half of one run, and the shares of the learners' time."""
    with tempfile.TemporaryDirectory() as folder:
        changes = {**settings(options, Path(folder)), "learner.num_learners": learners, "learner.threads": threads}
        result = echelon.train(replace(echelon.preset(options.preset, options.env), **changes), output=io.StringIO())
        rows = [row for row in read_rows(result.run_dir) if row["kind"] == "train"]
    shares = [share for name, share in result.summary["time"].items() if name.startswith("learner")]
    figures = {phase: statistics.mean(share[phase] for share in shares) for phase in PHASES}
    return {"updates_per_s": steady_rate([(row["wall_s"], row["updates"]) for row in rows]), **figures}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--preset", default="impala", help="what learns")
    parser.add_argument("--env", default="CartPole-v1", help="where")
    parser.add_argument("--hidden", type=int, default=512, help="units of each of two layers")
    parser.add_argument("--learners", type=int, nargs="+", default=[1, 2], help="how many, one run of each in turn")
    parser.add_argument("--actors", type=int, default=2, help="processes that act")
    parser.add_argument("--envs", type=int, default=64, help="environments of each actor")
    parser.add_argument("--device", default="cpu", help="where the learners compute")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3, help="how often each number has its turn")
    parser.add_argument("--output", default="", help="write every round to this file as JSON")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    cases = [(count, 1) for count in options.learners]
    if options.device == "cpu" and cores > 1:
        cases.insert(1, (1, min(cores, max(options.learners))))
    found: dict[tuple[int, int], list[dict[str, float]]] = {case: [] for case in cases}
    for _, case in in_turns(cases, options.rounds):
        found[case].append(measured(options, *case))
    print(f"{options.preset} on {options.env}, {options.hidden}x{options.hidden}, {options.device}, {cores} cores")
    print(f"{'learners':>8} {'threads':>8} {'updates/s':>10} " + " ".join(f"{phase:>9}" for phase in PHASES))
    for (learners, threads), rounds in found.items():
        middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        shares = " ".join(f"{middle[phase]:>9.0%}" for phase in PHASES)
        print(f"{learners:>8} {threads:>8} {middle['updates_per_s']:>10.2f} {shares}")
    if options.output:
        rows = [{"learners": case[0], "threads": case[1], "rounds": rounds} for case, rounds in found.items()]
        Path(options.output).write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
