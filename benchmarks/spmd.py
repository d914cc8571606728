"""Runs the programs of examples/spmd, and counts the episodes per worker until each is solved:

    python benchmarks/spmd.py [--algorithm all|a3c,dqn_apex,...] [--seeds 0-4] [--jobs 1] [--timeout-s 900] [--out FILE]
        [--plot FILE] [--examples spmd|ported|FOLDER]

Every program runs with `--seed N`. It counts as solved when it prints so, exits with code 0, and leaves no process.
CartPole (limit of 200 steps) is solved when the smoothed reward (0.9 of the old, 0.1 of the new one) is above 190 five
times in a row; Pendulum when the smoothed return, including exploration, is above -200. Each program fixes the number
of updates per round of episodes, so the number of episodes does not depend on the speed of the machine; the seconds do.
Only A3C has no rounds: the order of gradients depends on timing, so its figures vary slightly. `--plot` draws the
smoothed rewards. `--examples ported` runs the programs of examples/ported, in which processes do not wait for each
other, with the same goals; `--examples FOLDER` runs variants of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SOLVED = re.compile(r"Environment solved! Process (\d+), (\d+) episodes\.")
EPISODE = re.compile(r"Process (\d+) Episode (\d+) total reward=(-?[\d.]+)")
MARK = "ECHELON_SPMD_RUN"  # environment variable of every process of a program


@dataclass(frozen=True)
class Program:
    """A program and its goals."""

    title: str
    processes: str
    updates: str  # name of the constant with the updates per round, or the number
    median: int  # maximum of the median episodes per worker
    worst: int  # maximum for every seed
    solved_reward: int


PROGRAMS = {
    "a3c": Program("A3C, CartPole", "3", "1 each", 1300, 2000, 190),
    "dqn_apex": Program("DQNApex, CartPole", "2 + 2 learners", "updates_per_round", 700, 2000, 190),
    "impala": Program("IMPALA, CartPole", "2 + 2 learners", "updates_per_round", 100, 150, 190),
    "ddpg_apex": Program("DDPGApex, Pendulum", "2 + 2 learners", "updates_per_round", 500, 500, -200),
}


@dataclass(frozen=True)
class Outcome:
    """The result of one run."""

    algorithm: str
    seed: int
    seconds: float
    curve: list[float]  # smoothed rewards of the worker that solved it, or of the one with the most episodes
    failure: str = ""  # why it does not count as solved

    @property
    def episodes(self) -> int:
        return len(self.curve)


def run(program: Path, seed: int, timeout_s: float) -> Outcome:
    """Runs one program to its end."""
    algorithm = program.stem
    command = [sys.executable, str(program), "--seed", str(seed)]
    mark = f"{os.getpid()}-{algorithm}-{seed}"
    environ = os.environ | {"OMP_NUM_THREADS": "1", MARK: mark}
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
    try:
        output, errors = process.communicate(timeout=timeout_s)
        failure = "" if process.returncode == 0 else f"exit code {process.returncode}: {errors.strip()[-300:]}"
    except subprocess.TimeoutExpired:
        process.terminate()  # its members end, too
        output, errors = process.communicate()
        failure = f"not done within {timeout_s:.0f} s"
    left = processes_marked(mark)
    if left and not failure:
        failure = f"left the processes {', '.join(map(str, left))} behind"
    return outcome(algorithm, seed, output + errors, time.monotonic() - begun, failure)


def processes_marked(mark: str) -> list[int]:
    """Returns the processes with `mark` in their environment; zombies have none."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            is_marked = wanted in path.read_bytes().split(b"\0")
        except OSError:  # it has just ended, or belongs to another user
            continue
        if is_marked:
            found.append(int(path.parent.name))
    return found


def outcome(algorithm: str, seed: int, output: str, seconds: float, failure: str) -> Outcome:
    """Parses the output of a program."""
    curves: dict[int, list[float]] = {}
    for rank, _, smoothed in EPISODE.findall(output):
        curves.setdefault(int(rank), []).append(float(smoothed))
    curve = max(curves.values(), key=len, default=[])
    solved = SOLVED.search(output)
    if solved is not None:
        curve = curves[int(solved[1])]
        assert len(curve) == int(solved[2]), f"{algorithm} printed {len(curve)} of {solved[2]} episodes"
    elif not failure:
        failure = "ended without having solved it"
    return Outcome(algorithm, seed, seconds, curve, failure)


def updates_of(path: Path) -> str:
    """Returns the number of updates per round of episodes that the program defines."""
    name = PROGRAMS[path.stem].updates
    stated = re.search(rf"^{name}.*?= (\d+)", path.read_text(), re.MULTILINE)
    return stated[1] if stated else name.replace("updates_per_round", "any number")


def row(path: Path, outcomes: list[Outcome]) -> str:
    """Returns a line of the table."""
    algorithm, program = path.stem, PROGRAMS[path.stem]
    each = ", ".join(f"{x.episodes}{'' if not x.failure else ' (failed)'}" for x in outcomes)
    median = statistics.median(x.episodes for x in outcomes)
    worst = max(x.episodes for x in outcomes)
    met = not any(x.failure for x in outcomes) and median <= program.median and worst <= program.worst
    seconds = statistics.median(x.seconds for x in outcomes)
    cells = (algorithm, program.processes, updates_of(path), each, f"{median:g}", str(worst))
    return f"| {' | '.join(cells)} | {program.median} | {seconds:.0f} | {'yes' if met else 'NO'} |"


def draw(chosen: list[str], outcomes: list[Outcome], path: Path) -> None:
    """Draws the smoothed rewards of every run, one panel per program."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6 * ((len(chosen) + 1) // 2)), dpi=120, layout="constrained")
    panels: list[Any] = list(figure.subplots((len(chosen) + 1) // 2, 2, squeeze=False).flat)
    for name, axes in zip(chosen, panels, strict=False):
        program = PROGRAMS[name]
        for x in (x for x in outcomes if x.algorithm == name):
            axes.plot(range(1, x.episodes + 1), x.curve, linewidth=1.2, label=f"seed {x.seed}")
        axes.axhline(program.solved_reward, color="#8a8f98", linewidth=0.8, linestyle="--")
        axes.set_title(program.title, fontsize=10)
        axes.set_xlabel("episodes per worker", fontsize=9)
        axes.set_ylabel("smoothed reward", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, linewidth=0.5, alpha=0.3)
    for axes in panels[len(chosen) :]:
        axes.remove()
    figure.savefig(path)


def numbers(text: str) -> list[int]:
    """Parses seeds such as `0-4` or `1,5,7`."""
    first, dash, last = text.partition("-")
    return list(range(int(first), int(last) + 1)) if dash else [int(x) for x in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="all")
    parser.add_argument("--seeds", type=numbers, default=numbers("0-4"))
    parser.add_argument("--jobs", type=int, default=1, help="concurrent programs")
    parser.add_argument("--timeout-s", type=float, default=900.0)
    parser.add_argument("--out", type=Path, help="a JSON file for every run's outcome")
    parser.add_argument("--plot", type=Path, help="a picture of the learning curves")
    parser.add_argument("--examples", type=Path, default=Path("spmd"), help="a folder in examples, or a path")
    options = parser.parse_args()
    chosen = list(PROGRAMS) if options.algorithm == "all" else options.algorithm.split(",")
    unknown = [name for name in chosen if name not in PROGRAMS]
    if unknown:
        parser.error(f"no program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    folder = options.examples if options.examples.is_dir() else EXAMPLES / options.examples
    paths = [folder / f"{name}.py" for name in chosen]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        parser.error(f"there is no {', '.join(missing)}")
    runs = [(path, seed) for path in paths for seed in options.seeds]
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for x in pool.map(lambda job: run(job[0], job[1], options.timeout_s), runs):
            outcomes.append(x)
            end = x.failure or "solved"
            print(f"{x.algorithm} seed {x.seed}: {x.episodes} episodes, {x.seconds:.0f} s, {end}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(x) for x in outcomes], indent=1))
    if options.plot is not None:
        draw(chosen, outcomes, options.plot)
    print("\n| program | processes | updates per round | episodes per worker | median | worst | goal | seconds | met |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = [row(path, [x for x in outcomes if x.algorithm == path.stem]) for path in paths]
    print("\n".join(rows))
    sys.exit(any(line.endswith("NO |") for line in rows))


if __name__ == "__main__":
    main()
