"""Kills a process of each kind during a run, and compares the outcome and the recovery time of both sides.

The process is killed three times per run (beyond that, replacements are delayed deliberately), and every case is
repeated, for percentiles. The recovery time is from the signal until a row of metrics shows newly learned steps; rows
are written about once per second. Both sides run simultaneously: use a machine with spare cores.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from golden.checkout import Checkout, Row, Run, Tell, both, end_all, running

COMMON = ("--device=cpu", "--learner.threads=1", "--seed=1", "--run.checkpoint-interval-s=0.2", "--steps=1000000000")
NO_EVALUATION = "--evaluation.interval-s=0"
WORKER, AGENT = "worker", "agent"  # processes of this script, not of the run: they are not restarted
NUM_KILLS, NUM_RUNS = 3, 2


@dataclass(frozen=True)
class Case:
    """The role to kill; it may have one of several names, as names have changed."""

    name: str
    roles: tuple[str, ...]
    words: tuple[str, ...]
    with_workers: bool = False
    with_host: bool = False  # a second host joins the run; skipped for checkouts without hosts

    @property
    def num_kills(self) -> int:
        return 1 if self.roles[0] in (WORKER, AGENT) else NUM_KILLS


TWO_HOSTS = ("--engine=hosts", "--hosts=2")
SMALL_REPLAY = ("--replay.min-size=300",)
CASES = (
    Case("actor", ("actor-0",), ("train", "impala", "CartPole-v1", NO_EVALUATION)),
    Case("learner", ("learner",), ("train", "impala", "CartPole-v1", NO_EVALUATION)),
    Case("learner in lock-step", ("learner",), ("train", "ppo", "CartPole-v1", NO_EVALUATION, "--algorithm.epochs=1")),
    Case("one of two learners", ("learner-1",), ("train", "impala", "CartPole-v1", NO_EVALUATION, "--learners=2")),
    Case("inference server", ("inference-0",), ("train", "ppo", "CartPole-v1", NO_EVALUATION, "--acting=central")),
    Case("actor with replay", ("actor-0",), ("train", "apex-dqn", "CartPole-v1", NO_EVALUATION, *SMALL_REPLAY)),
    Case("learner with replay", ("learner",), ("train", "apex-dqn", "CartPole-v1", NO_EVALUATION, *SMALL_REPLAY)),
    Case(
        "shard server",
        ("shards-0",),
        ("train", "apex-dqn", "CartPole-v1", NO_EVALUATION, *SMALL_REPLAY, "--replay.transport=tcp"),
    ),
    Case("evaluator", ("evaluator",), ("train", "impala", "CartPole-v1", "--evaluation.interval-s=0.2")),
    Case("fork server", ("forkserver",), ("train", "impala", "CartPole-v1", NO_EVALUATION)),
    Case("gateway", ("door", "gateway"), ("learner", "dqn", "CartPole-v1", *SMALL_REPLAY), with_workers=True),
    Case("worker", (WORKER,), ("learner", "dqn", "CartPole-v1", *SMALL_REPLAY), with_workers=True),
    Case(
        "agent",
        (AGENT,),
        (
            "train",
            "impala",
            "CartPole-v1",
            NO_EVALUATION,
            "--actors=2",
            "--engine=hosts",
            "--hosts=2",
            "--hosts.lease-s=1",
        ),
        with_host=True,
    ),
)

NAMES = tuple(case.name for case in CASES)


@dataclass(frozen=True)
class Outcome:
    """The outcome for the user."""

    learned_on: bool
    code: int | None
    status: str
    restarts: int | None
    left: int  # remaining entries of the run's shared-memory folder
    recovery_s: tuple[float, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        after = "learned on" if self.learned_on else "did not learn on"
        left = f", {self.left} segments left" if self.left else ""
        return f"{after}, exit {self.code}, {self.status}, restarts {self.restarts}{left}"


def outcomes(side: Checkout, case: Case) -> list[Outcome]:
    """Trains until it learns, kills the process and waits until it learns again, a few times; then interrupts it."""
    if case.with_host and not (side.path / "src" / "echelon" / "hosts").exists():
        return []
    name = f"kill-{case.name.replace(' ', '-')}"
    found = []
    for number in range(NUM_RUNS):
        with tempfile.TemporaryDirectory(prefix="goldens-", dir="/dev/shm") as memory:
            found.append(_outcome(side, case, f"{name}-{number}", Path(memory)))
    return found


def _outcome(side: Checkout, case: Case, name: str, memory: Path) -> Outcome:
    port = _free_port() if case.with_workers or case.with_host else 0
    words = [*case.words, *COMMON, f"--shm-dir={memory}"]
    if case.with_workers:
        words.append(f"--address=127.0.0.1:{port}")
    if case.with_host:
        words.append(f"--hosts.address=tcp://127.0.0.1:{port}")
    with running(side, name, *words) as run:
        others = [_start_worker(side, name, port, 0)] if case.with_workers else []
        if case.with_host:
            join = ("host", f"--join=127.0.0.1:{port}", f"--shm-dir={memory}", "--name=other")
            others.append(side.start([*side.command, *join], side.folder / f"{name}-other-0.txt"))
        recovery_s: list[float] = []
        is_killed = run.until_learning() and (not case.with_host or run.until(partial(_has_other_host, run), 60.0))
        try:
            for _ in range(case.num_kills):
                begun = time.monotonic()
                is_killed = is_killed and _kill(run, case, others[0].pid if others else 0)
                if case.roles == (WORKER,):
                    others.append(_start_worker(side, name, port, 1))
                if is_killed and run.until_learning():
                    recovery_s.append(time.monotonic() - begun)
            learned = len(recovery_s) == case.num_kills and all(run.until_learning() for _ in range(3))
            if run.process.poll() is None:
                run.process.send_signal(signal.SIGINT)
            code = run.wait(60.0)
        finally:
            for number, other in enumerate(others):
                end_all(other, side.folder / f"{name}-other-{number}.txt")
        summary = run.summary()
    status = summary.get("status", "no summary") if is_killed else f"not killed: {run.output.read_text()[-200:]}"
    left = len(list(memory.iterdir()))
    return Outcome(learned, code, status, summary.get("restarts"), left, tuple(recovery_s))


def _kill(run: Run, case: Case, other: int) -> bool:
    """Kills the process; returns when its successor runs, the run ends, or the timeout has passed."""
    if case.roles == (AGENT,):  # until its lease has passed, the rest of the run learns without its actors
        os.kill(other, signal.SIGKILL)
        return run.until(lambda: not _has_other_host(run), 60.0)
    if case.roles == (WORKER,):
        os.kill(other, signal.SIGKILL)
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


def _has_other_host(run: Run) -> bool:
    return any(entry.get("host") == "other" for entry in run.entries().values())


def _start_worker(side: Checkout, name: str, port: int, number: int) -> subprocess.Popen[str]:
    words = ("worker", f"--learner=127.0.0.1:{port}", "--envs=2", f"--seed={number}")
    return side.start([*side.command, *words], side.folder / f"{name}-other-{number}.txt")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def recovery(found: list[Outcome]) -> str:
    """Returns the median and the largest recovery time as text."""
    times = [seconds for outcome in found for seconds in outcome.recovery_s]
    return f"{statistics.median(times):.1f} s, at most {max(times):.1f} ({len(times)} kills)" if times else "-"


def compare(old: Checkout, new: Checkout, tell: Tell, names: Collection[str]) -> Iterator[Row]:
    for case in [case for case in CASES if case.name in names]:
        first, second = both(old, new, partial(outcomes, case=case))
        before, after = (" | ".join(sorted({str(outcome) for outcome in found})) for found in (first, second))
        verdict: Literal["same", "differs", "added"] = "same" if before == after else "differs" if first else "added"
        row = Row("kills", case.name, verdict, before, after, f"recovery {recovery(first)} | {recovery(second)}")
        tell(f"kills: {case.name}: {row.verdict}: {before}{'' if before == after else f' | {after}'}; {row.note}")
        yield row
