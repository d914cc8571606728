"""A training in a process of its own, as a test sees it: its output, its processes, its record."""

from __future__ import annotations

import io
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import echelon
import warm
from echelon.config import replace
from echelon.presets import preset
from echelon.runs.metrics import read_rows
from warm import MARK

T = TypeVar("T")
TESTS = Path(__file__).resolve().parent
DEADLINE_S = 90.0  # of events that take a second on an idle machine
MAX_PAUSE_S = 0.05


def wait_until(condition: Callable[[], T], what: str | Callable[[], str], deadline_s: float = DEADLINE_S) -> T:
    """What `condition` returns once that is true; asked less and less often, since asking takes processor time.

    A function `what` is called when the time is over, so that it can show the output until then.
    """
    deadline, pause_s = time.monotonic() + deadline_s, 0.002
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {deadline_s} s until {what if isinstance(what, str) else what()}"
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, MAX_PAUSE_S)
    return value


def processes_marked(mark: str) -> list[int]:
    """The living processes that have `mark` in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile
            continue
    return found


def has_torch(pid: int) -> bool:
    """Whether a process has loaded torch."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def train_shortly(folder: Path, shm_dir: Path, name: str, engine: str, **changes: Any) -> dict[str, Any]:
    """The summary of a training of preset `name` on CartPole-v1, in a run folder of its own under `folder`."""
    settings = {
        "run.dir": str(folder / f"{name}-{len(list(folder.iterdir()))}"),
        "engine": engine,
        "shm_dir": str(shm_dir),
        "evaluation.episodes": 0,
        "learner.threads": 1,
        **changes,
    }
    return echelon.train(replace(preset(name, "CartPole-v1"), **settings), output=io.StringIO()).summary


class Running:
    """`echelon ARGUMENTS` in the background, with a shared memory folder of its own."""

    def __init__(
        self,
        run_dir: Path,
        shm_dir: Path,
        *arguments: str,
        before: tuple[str, ...] = (),
        fresh: bool = False,
        stdout: int | None = None,
    ) -> None:
        """`before` are words to put before the command; `fresh` has a new interpreter run it, as a shell does.

        With `stdout`, only stderr is in `text`.
        """
        self.run_dir, self.shm_dir = run_dir, shm_dir
        self.mark = secrets.token_hex(8)
        self.output = run_dir.with_name(f"{run_dir.name}-{self.mark}.txt")
        path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS), os.environ.get("PYTHONPATH", "")])
        with self.output.open("w") as file:
            self.process = (subprocess.Popen if fresh else warm.Popen)(
                [*before, sys.executable, "-m", "echelon.cli.main", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file if stdout is None else stdout,
                stderr=file,
                start_new_session=True,  # leads a group of its own, as a shell's foreground job does
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARK: self.mark},
            )

    @classmethod
    def train(
        cls,
        preset: str,
        env: str,
        run_dir: Path,
        shm_dir: Path,
        *,
        fresh: bool = False,
        stdout: int | None = None,
        **options: Any,
    ) -> Running:
        """Options by name: steps=10, or in full: {"actor.envs": 2}."""
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        places = [f"--run-dir={run_dir}", f"--shm-dir={shm_dir}"]
        return cls(run_dir, shm_dir, "train", preset, env, *places, *words, fresh=fresh, stdout=stdout)

    @classmethod
    def resume(cls, run_dir: Path, shm_dir: Path, steps: int, *options: str, fresh: bool = False) -> Running:
        return cls(run_dir, shm_dir, "resume", str(run_dir), f"--steps={steps}", *options, fresh=fresh)

    def text(self) -> str:
        return self.output.read_text()

    def until(self, condition: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
        """Waits for an event of a run that must not end before it."""

        def look() -> T:
            is_over = self.process.poll() is not None  # asked first: what it did last counts
            value = condition()
            assert value or not is_over, f"the run ended before {what}:\n{self.text()}"
            return value

        return wait_until(look, lambda: f"{what}; so far:\n{self.text()}", deadline_s)

    def processes(self) -> dict[str, int]:
        """Name -> process number of what runs now."""
        try:
            record = json.loads((self.run_dir / "processes.json").read_text())
        except FileNotFoundError:
            return {}
        return {name: entry["pid"] for name, entry in record.items()}

    def pid(self, name: str, besides: int = 0) -> int:
        """The process number of `name` once it is there and another than `besides`."""
        return self.until(lambda: (p := self.processes().get(name, 0)) != besides and p, f"{name} runs")

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def heads(self, num_actors: int) -> list[int]:
        """Trajectories that each actor has committed so far."""
        segments = list(self.shm_dir.glob(f"echelon-{self.process.pid}-*/trajectories"))  # agents of Ray are here, too
        if not segments:
            return [0] * num_actors
        words = np.fromfile(segments[0], np.int64, 8 * num_actors)  # `head` comes first, a cache line each
        if words.size < 8 * num_actors:  # just being made
            return [0] * num_actors
        return [int(head) for head in words.reshape(num_actors, 8)[:, 0]]

    def until_acting(self, index: int, num_actors: int = 2) -> None:
        """Waits for two more trajectories of an actor."""
        before = self.heads(num_actors)[index]
        self.until(lambda: self.heads(num_actors)[index] >= before + 2, f"actor {index} acts")

    def learns_while_stopped(self, name: str) -> None:
        """Stops one of two actors: the other acts and the learner learns; then it goes on as the process it was."""
        index = int(name.rpartition("-")[2])
        pid = self.kill(name, signal.SIGSTOP)
        before = self.heads(2)
        for _ in range(3):
            self.until_learning()
        self.until(lambda: self.heads(2)[1 - index] > before[1 - index] + 1, "the other acts")
        assert self.heads(2)[index] <= before[index] + 1
        os.kill(pid, signal.SIGCONT)
        self.until_acting(index)
        assert self.pid(name) == pid

    def rows(self) -> list[dict[str, Any]]:
        if not (self.run_dir / "metrics.jsonl").exists():
            return []
        return [row for row in read_rows(self.run_dir) if row["kind"] == "train"]

    def until_learning(self) -> int:
        """Waits for learned steps beyond those reported so far; returns their number."""
        seen = len(self.rows())
        before = self.rows()[-1]["env_steps"] if seen else 0
        self.until(lambda: any(row["env_steps"] > before for row in self.rows()[seen:]), "the learner learns")
        return int(self.rows()[-1]["env_steps"])

    def code(self) -> int:
        """The exit code, once the run ended by itself."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end:\n{self.text()}") from None

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return summary

    def stop(self) -> dict[str, Any]:
        """Ends the run as a user does; its summary."""
        self.process.send_signal(signal.SIGINT)
        assert self.code() == 130, self.text()
        self.assert_nothing_left()
        return self.summary()

    def assert_nothing_left(self) -> None:
        """No process, no shared memory, no list of processes."""
        wait_until(lambda: not processes_marked(self.mark), lambda: f"no process is left of\n{self.text()}")
        wait_until(
            lambda: not list(self.shm_dir.iterdir()),
            lambda: f"shared memory is empty, but for {sorted(map(str, self.shm_dir.rglob('*')))}",
        )
        assert not (self.run_dir / "processes.json").exists()

    def close(self) -> None:
        """Ends what a failed test left."""
        for pid in processes_marked(self.mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


class Runs:
    """Starts trainings; all of them end with the test."""

    def __init__(self, folder: Path, shm_dir: Path) -> None:
        self.folder, self.shm_dir = folder, shm_dir
        self.started: list[Running] = []

    def train(self, preset: str = "impala", env: str = "CartPole-v1", **options: Any) -> Running:
        options = {"steps": 10**9, "actor.envs": 8, "evaluation.episodes": 0, **options}
        if env == "CartPole-v1":  # leaves the processor to the tests beside it
            options = {"env.wrappers": "unruly:Unhurried", **options}
        run = Running.train(preset, env, self.folder / "run", self.shm_dir, **options)
        self.started.append(run)
        return run

    def resume(self, steps: int, *options: str, fresh: bool = False) -> Running:
        run = Running.resume(self.folder / "run", self.shm_dir, steps, *options, fresh=fresh)
        self.started.append(run)
        return run
