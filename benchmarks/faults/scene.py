"""A training and its company (workers, a second host) as somebody outside sees them: folders, output, processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.roles.gauge import FIGURES, NUM_FIGURES, NUM_WORDS, PHASES
from echelon.runs.checkpoint import load_parts, newest_intact
from faults.kinds import COMMON, Kind

MARK = "ECHELON_TEST_RUN"  # environment variable of every process of a scene; the one that tests use, too
BENCHMARKS = Path(__file__).resolve().parents[1]
POLL_S = 0.005
FILLER = "~"
PIPE_BYTES = 4096


class Never(Exception):
    """What had to happen did not happen in time."""


class Scene:
    """One run of a kind, in folders of its own that `close` removes."""

    def __init__(self, kind: Kind, words: Sequence[str], popen: Callable[..., Any], disk_mb: int) -> None:
        self.kind, self.popen = kind, popen
        self.mark = secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.memory = Path(tempfile.mkdtemp(prefix="chaos-", dir="/dev/shm"))
        self.disk = self.folder / "disk"
        self.disk.mkdir()
        self.is_mounted = mount(self.disk, disk_mb)
        self.run_dir, self.order, self.fallback = self.disk / "run", self.folder / "order", self.folder / "fallback"
        self.fallback.mkdir()
        self.port = free_port() if kind.company else 0
        self.output = Output()
        self.company: list[Any] = []
        self.rows: list[dict[str, Any]] = []
        self._read = 0
        places = [f"--shm-dir={self.memory}", f"--run-dir={self.run_dir}", f"--run.fallback-dir={self.fallback}"]
        places.append(f"--env-kwargs={json.dumps({'order': str(self.order)})}")
        if kind.company == "workers":
            places.append(f"--address=127.0.0.1:{self.port}")
        elif kind.company == "host":
            places.append(f"--hosts.address=tcp://127.0.0.1:{self.port}")
        self.process = self.start([*kind.words, *COMMON, *words, *places], self.output)
        self.begin_company()

    def start(self, words: list[str], output: Output | None = None) -> Any:
        path = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent / "src"), os.environ.get("PYTHONPATH", "")])
        file = output.inlet if output is not None else subprocess.DEVNULL
        return self.popen(
            [sys.executable, "-m", "echelon.cli.main", *words],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARK: self.mark},
        )

    def begin_company(self) -> None:
        """Starts the missing workers or the second host, as a cluster does."""
        self.company = [one for one in self.company if one.poll() is None]
        if self.kind.company == "workers":
            while len(self.company) < 2:
                words = ["worker", f"--learner=127.0.0.1:{self.port}", "--trust-learner", "--envs=2"]
                self.company.append(self.start([*words, f"--seed={len(self.company)}"]))
        elif self.kind.company == "host" and not self.company:
            words = ["host", f"--join=127.0.0.1:{self.port}", f"--shm-dir={self.memory}", "--name=other"]
            self.company.append(self.start(words))

    def resume(self) -> None:
        """Resumes the run once it has ended."""
        self.process = self.start(["resume", str(self.run_dir)], self.output)
        self.begin_company()

    def give_order(self, what: str) -> None:
        """Tells the environments that one of them is to raise, to hang or to return NaN."""
        draft = self.order.with_name("draft")
        draft.write_text(what)
        draft.rename(self.order)

    # What is seen.

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0, *, poll_s: float = POLL_S) -> Any:
        """Returns the first true value of `condition`; raises Never if the run ends or the time passes first."""
        deadline = time.monotonic() + timeout_s
        while True:
            is_over = self.process.poll() is not None
            if value := condition():
                return value
            if is_over or time.monotonic() > deadline:
                raise Never(f"{'the run ended before' if is_over else f'not within {timeout_s:g} s:'} {what}")
            time.sleep(poll_s)

    def entries(self) -> dict[str, dict[str, Any]]:
        with contextlib.suppress(OSError, ValueError):  # not there yet, or just being replaced
            found: dict[str, dict[str, Any]] = json.loads((self.run_dir / "processes.json").read_text())
            return found
        return {}

    def is_recorded(self) -> bool:
        """Whether all processes in the record are alive."""
        entries = self.entries()
        return bool(entries) and all(Path(f"/proc/{entry['pid']}").exists() for entry in entries.values())

    def pid(self, role: str) -> int:
        if role in ("worker", "agent"):
            return int(self.company[0].pid)
        return int(self.until(lambda: self.entries().get(role, {}).get("pid"), f"{role} runs"))

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Sends a signal to the living process of a role; returns its pid."""

        def is_sent() -> int:
            with contextlib.suppress(ProcessLookupError):  # being replaced: its successor is not recorded yet
                os.kill(pid := self.pid(role), number)
                return pid
            return 0

        return int(self.until(is_sent, f"{role} can be killed"))

    def _segment(self, name: str, dtype: type, count: int) -> Any:
        """The first words of a segment of the run, which the second host's session does not hold; zeros without it."""
        for path in self.memory.glob(f"echelon-{self.process.pid}-*/{name}"):
            with contextlib.suppress(OSError):
                words: Any = np.fromfile(path, dtype, count)
                if words.size == count:
                    return words
        return np.zeros(count, dtype)

    def version(self) -> int:
        """The version of the newest weights, 0 if there is none."""
        return int(self._segment("weights", np.int64, 1)[0])

    def progress(self, role: str) -> tuple[int, int]:
        """The incarnation of a role, counted from 1, and its progress: read where a full disk does not hide them."""
        incarnation, progress = self._segment(f"gauges/{role}", np.int64, 2)
        return int(incarnation), int(progress)

    def interactions(self) -> float:
        """Steps that the gateway has received, this incarnation of it."""
        values = self._segment("gauges/gateway", np.float64, NUM_WORDS + len(PHASES) + NUM_FIGURES)
        return float(np.nan_to_num(values[NUM_WORDS + len(PHASES) + FIGURES["gateway"].index("interactions")]))

    def until_training(self, timeout_s: float = 60.0) -> None:
        """Waits until the learner has published two more versions of the weights."""
        before = self.version()
        self.until(lambda: self.version() >= before + 2, "the learner publishes weights", timeout_s)

    def newest_checkpoint(self) -> int:
        """The step of the newest checkpoint, 0 if there is none."""
        found = (self.run_dir / "checkpoints").glob("step_*")
        return max((int(path.name.removeprefix("step_")) for path in found), default=0)

    def restored(self) -> list[int]:
        """The checkpoints that learners have resumed from, as the console reported them."""
        return [int(step) for step in re.findall(r"resumes? from step_(\d+)", self.output.text())]

    def new_rows(self) -> list[dict[str, Any]]:
        """The rows of training that were written since the last call."""
        file = self.run_dir / "metrics.jsonl"
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

    def summary(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
            return summary
        return {}

    def checkpointed_steps(self, folder: Path) -> int | None:
        """The steps that the newest intact checkpoint below `folder` counts."""
        found = newest_intact(folder)
        return int(load_parts(found[0], ("counters",))["counters"]["env_steps"]) if found is not None else None

    def processes(self) -> list[int]:
        """The living processes of the scene."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it ended meanwhile
                if folder.name.isdigit() and f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def wait(self, timeout_s: float) -> int | None:
        try:
            return int(self.process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def stacks(self) -> str:
        """The stacks of all processes, where py-spy is installed, and the output."""
        tool = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
        parts = [self.output.text()[-4000:]]
        for pid in self.processes():
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                done = subprocess.run([tool, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=20.0)
                parts.append(done.stdout or done.stderr)
        return "\n\n".join(parts)

    def close(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in [self.process, *self.company]:
            process.wait()
        self.output.close()
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.disk)], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.memory, ignore_errors=True)


class Output:
    """A pipe for the output of a run and a thread that reads it, unless it is `stalled`."""

    def __init__(self) -> None:
        self.outlet, self.inlet = os.pipe()
        fcntl.fcntl(self.inlet, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._parts: list[bytes] = []
        self._reads = threading.Event()
        self._reads.set()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        poller = select.poll()
        poller.register(self.outlet, select.POLLIN)
        while True:
            poller.poll()
            self._reads.wait()  # before the read, which would make room in the pipe
            if not (part := os.read(self.outlet, 65536)):
                return
            self._parts.append(part)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Fills the pipe and leaves it so: whoever writes to it waits."""
        self._reads.clear()
        extra = os.open(f"/proc/self/fd/{self.inlet}", os.O_WRONLY | os.O_NONBLOCK)  # its own non-blocking description
        try:
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(extra, (FILLER * 99 + "\n").encode())
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(extra, FILLER.encode())
            yield
        finally:
            os.close(extra)
            self._reads.set()

    def text(self) -> str:
        return b"".join(self._parts).decode(errors="replace").replace(FILLER * 99 + "\n", "").replace(FILLER, "")

    def close(self) -> None:
        self._reads.set()
        os.close(self.inlet)  # the thread reads to the end
        self._thread.join(10.0)
        os.close(self.outlet)


def mount(folder: Path, size_mb: int) -> bool:
    """Mounts a small disk at `folder`; returns whether that is permitted."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
