"""A role of each kind is killed once while a run trains: what becomes of the run, on both sides."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from golden.checkout import Checkout, Row, Run, Tell, both, end_all, running

COMMON = ("--device=cpu", "--learner.threads=1", "--seed=1", "--run.checkpoint-interval-s=0.2", "--steps=1000000000")
NO_EVALUATION = "--evaluation.interval-s=0"
WORKER = "worker"  # a process of ours, not of the run: nobody starts it again


@dataclass(frozen=True)
class Case:
    """Who is killed; a role may go by one of several names, as those changed."""

    name: str
    roles: tuple[str, ...]
    words: tuple[str, ...]
    with_workers: bool = False


SMALL_REPLAY = ("--replay.min-size=300",)
CASES = (
    Case("actor", ("actor-0",), ("train", "impala", "CartPole-v1", NO_EVALUATION)),
    Case("learner", ("learner",), ("train", "impala", "CartPole-v1", NO_EVALUATION)),
    Case("learner, lock-step", ("learner",), ("train", "ppo", "CartPole-v1", NO_EVALUATION, "--algorithm.epochs=1")),
    Case("one of two learners", ("learner-1",), ("train", "impala", "CartPole-v1", NO_EVALUATION, "--learners=2")),
    Case("inference server", ("inference-0",), ("train", "ppo", "CartPole-v1", NO_EVALUATION, "--acting=central")),
    Case("actor, replay", ("actor-0",), ("train", "apex-dqn", "CartPole-v1", NO_EVALUATION, *SMALL_REPLAY)),
    Case("learner, replay", ("learner",), ("train", "apex-dqn", "CartPole-v1", NO_EVALUATION, *SMALL_REPLAY)),
    Case(
        "shard server",
        ("shards-0",),
        ("train", "apex-dqn", "CartPole-v1", NO_EVALUATION, *SMALL_REPLAY, "--replay.transport=tcp"),
    ),
    Case("evaluator", ("evaluator",), ("train", "impala", "CartPole-v1", "--evaluation.interval-s=0.2")),
    Case("fork server", ("forkserver",), ("train", "impala", "CartPole-v1", NO_EVALUATION)),
    Case("gateway", ("door", "gateway"), ("learner", "dqn", "CartPole-v1", *SMALL_REPLAY), with_workers=True),
    Case("worker", (WORKER,), ("learner", "dqn", "CartPole-v1", *SMALL_REPLAY), with_workers=True),
)


@dataclass(frozen=True)
class Outcome:
    """What the user sees."""

    learned_on: bool
    code: int | None
    status: str
    restarts: int | None
    left: int  # entries of the run's shared memory folder afterwards

    def __str__(self) -> str:
        after = "learned on" if self.learned_on else "did not learn on"
        left = f", {self.left} segments left" if self.left else ""
        return f"{after}, exit {self.code}, {self.status}, restarts {self.restarts}{left}"


def outcome(side: Checkout, case: Case) -> Outcome:
    """Trains until it learns, kills the role, lets it learn again, stops it as a user does."""
    name = f"kill-{case.name.replace(', ', '-').replace(' ', '-')}"
    with tempfile.TemporaryDirectory(prefix="goldens-", dir="/dev/shm") as memory:
        return _outcome(side, case, name, Path(memory))


def _outcome(side: Checkout, case: Case, name: str, memory: Path) -> Outcome:
    port = _free_port() if case.with_workers else 0
    address = (f"--address=127.0.0.1:{port}",) if case.with_workers else ()
    words = (*case.words, *COMMON, f"--shm-dir={memory}", *address)
    with running(side, name, *words) as run:
        workers = [_start_worker(side, name, port, 0)] if case.with_workers else []
        try:
            is_killed = run.until_learning() and _kill(run, case, workers[0].pid if workers else 0)
            if case.roles == (WORKER,):
                workers.append(_start_worker(side, name, port, 1))
            learned = is_killed and all(run.until_learning() for _ in range(5))
            if run.process.poll() is None:
                run.process.send_signal(signal.SIGINT)
            code = run.wait(60.0)
        finally:
            for number, worker in enumerate(workers):
                end_all(worker, side.folder / f"{name}-worker-{number}.txt")
        summary = run.summary()
    status = summary.get("status", "no summary") if is_killed else f"not killed: {run.output.read_text()[-200:]}"
    return Outcome(learned, code, status, summary.get("restarts"), len(list(memory.iterdir())))


def _kill(run: Run, case: Case, worker: int) -> bool:
    """Kills the role; returns when its successor is there, or the run or the time is over."""
    if case.roles == (WORKER,):
        os.kill(worker, signal.SIGKILL)
        return True
    found: dict[str, int] = {}

    def look() -> bool:
        found.update({name: pid for name, pid in run.processes().items() if name in case.roles})
        return bool(found)

    if not run.until(look, 60.0):
        return False
    ((name, pid),) = found.items()
    os.kill(pid, signal.SIGKILL)
    run.until(lambda: run.processes().get(name, pid) != pid, 60.0)
    return True


def _start_worker(side: Checkout, name: str, port: int, number: int) -> subprocess.Popen[str]:
    words = ("worker", f"--learner=127.0.0.1:{port}", "--envs=2", f"--seed={number}")
    return side.start([*side.command, *words], side.folder / f"{name}-worker-{number}.txt")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def compare(old: Checkout, new: Checkout, tell: Tell) -> Iterator[Row]:
    for case in CASES:
        first, second = both(old, new, partial(outcome, case=case))
        row = Row("kills", case.name, "same" if first == second else "differs", str(first), str(second))
        tell(f"kills: {case.name}: {row.verdict}: {first}{'' if first == second else f' | {second}'}")
        yield row
