"""A checkout to compare, and the commands that run in it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.01
LIVE: dict[Path, subprocess.Popen[str]] = {}  # running commands, by their output file
INTERRUPTED = threading.Event()
MARK = "ECHELON_GOLDENS_RUN"  # environment variable of every process of a command


@dataclass(frozen=True)
class Row:
    """One comparison. Only the verdict `differs` fails."""

    section: str
    item: str
    verdict: Literal["same", "differs", "added", "skipped"]
    old: str = ""
    new: str = ""
    note: str = ""


Tell = Callable[[str], None]


@dataclass(frozen=True)
class Finished:
    """A command that has ended: its exit code (None: timeout) and its output."""

    code: int | None
    output: str

    @property
    def tail(self) -> str:
        return " / ".join(self.output.strip().splitlines()[-3:])[-300:]


@dataclass(frozen=True)
class Checkout:
    """One side of the comparison: its sources, and a folder for all files of its commands."""

    label: str
    path: Path
    folder: Path
    extra_path: tuple[Path, ...] = ()  # on the module path before the sources
    variables: dict[str, str] = field(default_factory=dict)  # of the environment

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        found = self.python("-c", "import echelon; print(echelon.__file__)").output.strip()
        if not found.startswith(str(self.path / "src")):
            raise SystemExit(f"{self.path} is not a checkout of echelon: {found!r} was imported instead of its src.")

    @property
    def command(self) -> list[str]:
        """The command `echelon`, as defined in pyproject.toml."""
        project = tomllib.loads((self.path / "pyproject.toml").read_text())
        return [sys.executable, "-m", project["project"]["scripts"]["echelon"].partition(":")[0]]

    def environment(self, mark: str) -> dict[str, str]:
        threads = {"OMP_NUM_THREADS": "1", "COLUMNS": "1000"}  # wide, so that help texts are not wrapped
        own = os.environ.get("PYTHONPATH", "")  # the checkouts need the packages on it, too
        path = os.pathsep.join(map(str, [*self.extra_path, self.path / "src", *filter(None, [own])]))
        return {**os.environ, **threads, **self.variables, "PYTHONPATH": path, MARK: mark}

    def start(self, command: Sequence[str], output: Path) -> subprocess.Popen[str]:
        """Starts a command in the folder of this side; its output goes to the file `output`."""
        if INTERRUPTED.is_set():
            raise RuntimeError("interrupted")
        with output.open("w") as file:
            LIVE[output] = process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment(str(output)),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        return process

    def finish(self, command: Sequence[str], timeout_s: float = TIMEOUT_S) -> Finished:
        """Runs a command to its end."""
        output = self.folder / f"output-{time.monotonic_ns()}.txt"
        process = self.start(command, output)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return Finished(None, output.read_text() + f"\nno end within {timeout_s:g} s")
        finally:
            end_all(process, output)
        return Finished(code, output.read_text())

    def echelon(self, *words: str, timeout_s: float = TIMEOUT_S) -> Finished:
        return self.finish([*self.command, *words], timeout_s)

    def python(self, *words: str, timeout_s: float = TIMEOUT_S) -> Finished:
        return self.finish([sys.executable, *words], timeout_s)

    def presets(self) -> list[str]:
        lines = self.python("-c", "from echelon.presets import PRESETS; print(*PRESETS)").output.splitlines()
        return lines[-1].split()


def end_all(process: subprocess.Popen[str], output: Path) -> None:
    """Kills all remaining processes of the command that prints to `output`."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if folder.name.isdigit() and f"{MARK}={output}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
    process.wait()
    LIVE.pop(output, None)


T = TypeVar("T")


def both(old: Checkout, new: Checkout, work: Callable[[Checkout], T]) -> tuple[T, T]:
    """Runs `work` for both sides concurrently, so it must not measure time; returns both results."""
    with ThreadPoolExecutor(2) as pool:
        try:
            first, second = pool.map(work, (old, new))
        except BaseException:  # mainly an interrupt, which the commands that the threads wait for do not receive
            INTERRUPTED.set()
            for output, process in list(LIVE.items()):
                end_all(process, output)
            raise
    return first, second


class Run:
    """A training in the background, observed through its run folder."""

    def __init__(self, side: Checkout, name: str, *words: str) -> None:
        self.folder = side.folder / name
        self.output = side.folder / f"{name}.txt"
        self.process = side.start([*side.command, *words, f"--run-dir={self.folder}"], self.output)
        self.rows: list[dict[str, Any]] = []
        self._read = 0

    def look(self) -> list[dict[str, Any]]:
        """Returns the training rows recorded since the last call."""
        file = self.folder / "metrics.jsonl"
        if not file.exists():
            return []
        with file.open("rb") as lines:
            lines.seek(self._read)
            text = lines.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        fresh = [row for line in whole.splitlines() if (row := json.loads(line))["kind"] == "train"]
        self.rows += fresh
        return fresh

    def until(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> bool:
        """Waits until `condition` holds; returns False if the run ended or the timeout passed first."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                return condition()
            time.sleep(POLL_S)
        return True

    def entries(self) -> dict[str, dict[str, Any]]:
        """Returns the pids that the run has recorded, by role."""
        with contextlib.suppress(OSError, ValueError):  # not written yet, or just being replaced
            record: dict[str, dict[str, Any]] = json.loads((self.folder / "processes.json").read_text())
            return record
        return {}

    def processes(self) -> dict[str, int]:
        return {name: entry["pid"] for name, entry in self.entries().items()}

    def summary(self) -> dict[str, Any]:
        with contextlib.suppress(OSError):
            summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
            return summary
        return {}

    def wait(self, timeout_s: float = TIMEOUT_S) -> int | None:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Interrupts the run, so that it removes its shared memory; kills it after a timeout."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.wait(STOP_TIMEOUT_S)
        end_all(self.process, self.output)


@contextlib.contextmanager
def running(side: Checkout, name: str, *words: str) -> Iterator[Run]:
    """Yields a training, and ends it in any case."""
    run = Run(side, name, *words)
    try:
        yield run
    finally:
        run.close()
