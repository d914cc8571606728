"""Traces runs: the modules that a training imports, and the files on the path of one environment step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from golden.checkout import Checkout, Run, running

HOOK = Path(__file__).with_name("hook")
WARM_UPDATES = 20
TRACED_UPDATES, TRACED_S = 200, 20.0  # the window ends at whichever is reached first
EVERY = 0.6  # share of the cycles of a role's busiest file; on two busy cores files off the walk stay below 0.35
COLD_ROLES = ("evaluator", "forkserver", "coordinator")  # on no step's path
COMMON = ("--engine=local", "--actors=1", "--device=cpu", "--evaluation.episodes=0", "--steps=1000000000", "--seed=1")
QUEUE = ("--envs-per-actor=2", "--actor.trajectory=1", "--learner.max-lag=0")
WALKS = {
    "impala local": ("train", "impala", "CartPole-v1", *COMMON, *QUEUE, "--acting=local"),
    "ppo central": (
        *("train", "ppo", "CartPole-v1", *COMMON, *QUEUE, "--acting=central"),
        *("--algorithm.epochs=1", "--algorithm.minibatches=1"),
    ),
    "apex-dqn over tcp": (
        *("train", "apex-dqn", "CartPole-v1", *COMMON, "--envs-per-actor=2", "--replay.transport=tcp"),
        *("--replay.min-size=64", "--replay.batch=32", "--replay.samples-per-insert=16"),
    ),
}
DEFINITION = f"""\
A file is on the walk if one of its functions is entered in every cycle of the data path (act, env step, hand over;
take, learn, publish; the new weights reach the acting side), in the processes of the actor, the learner, inference and
shard servers. One actor in lock-step, {TRACED_UPDATES} updates after warm-up. As processes overlap, {EVERY:.0%}
of the cycles are enough; the rest (heartbeats, metrics, ends of episodes) is counted apart, as "at times"."""


@dataclass(frozen=True)
class Walk:
    """The files of one step, by the kind of role that enters them, and the files entered at times."""

    cycles: int
    by_role: dict[str, list[str]]
    at_times: list[str]

    @property
    def files(self) -> list[str]:
        return sorted({file for files in self.by_role.values() for file in files})


def watched(checkout: Path, folder: Path) -> Checkout:
    """Returns the checkout with the hook installed in its processes."""
    variables = {"MAP_FOLDER": str(folder), "MAP_SOURCES": str(checkout / "src" / "echelon")}
    return Checkout("map", checkout, folder, extra_path=(HOOK,), variables=variables)


def modules_behind_train(checkout: Path, folder: Path) -> list[str]:
    """Returns the modules of Echelon that the processes of a short training import."""
    side = watched(checkout, folder)
    finished = side.echelon(
        *("train", "impala", "CartPole-v1", "--engine=local", "--acting=local", "--steps=20000", "--device=cpu"),
        *("--evaluation.interval-s=0.5", f"--run-dir={folder / 'run'}"),
    )
    if finished.code != 0:
        raise SystemExit(f"the training behind `modules` failed: {finished.tail}")
    return sorted(set((folder / "modules.txt").read_text().split()))


def walk(checkout: Path, folder: Path, words: tuple[str, ...]) -> Walk:
    """Trains in lock-step, counts entered files for a while, and returns those of every cycle."""
    folder.mkdir(parents=True, exist_ok=True)
    window = folder / "window"
    window.write_bytes(bytes(16))
    side = watched(checkout, folder)
    with running(side, "run", *words) as run:
        if not run.until(lambda: _updates(run) >= WARM_UPDATES):
            raise SystemExit(f"the run to trace did not begin to learn: {run.output.read_text()[-500:]}")
        began = _updates(run)
        _switch(window, 1)
        run.until(lambda: _updates(run) - began >= TRACED_UPDATES, TRACED_S)
        cycles = _updates(run) - began
        _switch(window, 2)
        roles = {name: pid for name, pid in run.processes().items() if name.partition("-")[0] not in COLD_ROLES}
        traces = {name: folder / f"calls-{pid}.json" for name, pid in roles.items()}
        if not roles or not run.until(lambda: all(file.exists() for file in traces.values())):
            raise SystemExit(f"no trace of {', '.join(roles) or 'any role'}: {run.output.read_text()[-500:]}")
        slices = {name: json.loads(file.read_text()) for name, file in traces.items()}
    if cycles < TRACED_UPDATES / 4:
        raise SystemExit(f"only {cycles} updates in {TRACED_S:g} s: the machine is too busy for an exact walk.")
    by_role: dict[str, list[str]] = {}
    for name, counts in slices.items():
        least = EVERY * max(counts.values())
        by_role[name.partition("-")[0]] = sorted(file for file, count in counts.items() if count >= least)
    steady = {file for files in by_role.values() for file in files}
    return Walk(cycles, by_role, sorted({file for counts in slices.values() for file in counts} - steady))


def _updates(run: Run) -> int:
    run.look()
    return int(run.rows[-1]["updates"]) if run.rows else 0


def _switch(window: Path, state: int) -> None:
    with window.open("r+b") as file:
        file.write(bytes([state]))  # of a number of eight bytes, little-endian
