"""Trains, and measures the processor time of the training's roles and of other programs on its cores."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from echelon.config import TrainConfig, replace
from echelon.roles.learner import WARM_UP_S
from echelon.roles.supervisor import PROCESSES
from echelon.runs.metrics import METRICS
from echelon.training import RunResult, train

LOOK_INTERVAL_S = 0.1
TELL_INTERVAL_S = 2.0
OWN = "coordinator"


@dataclass(frozen=True, slots=True)
class UsageSample:
    """A sample of a run: seconds of processor time since its start, by kind of role."""

    env_steps: int
    wall_s: float
    cpu_s: dict[str, float]
    busy_s: float  # of all cores together, by all programs


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time per environment step between two samples, in microseconds; the parts sum to `total_us`."""

    total_us: float  # time of all cores
    roles_us: dict[str, float]
    others_us: float  # other programs
    idle_us: float


class UsageWatch(threading.Thread):
    """Samples the run in `run_dir` at every row of its metrics; a thread, as this process runs the training.

    It sleeps almost always, and no role of a local run is in this process.
    """

    def __init__(self, run_dir: Path, report: Callable[[dict[str, Any]], None]) -> None:
        """`report` gets a row of the metrics every TELL_INTERVAL_S."""
        super().__init__(name="bench-watch", daemon=True)
        self.run_dir, self.report = run_dir, report
        self.samples: list[UsageSample] = []
        self._over = threading.Event()
        self._offset = 0
        self._cpu_s: dict[tuple[str, int], float] = {}
        self._own_start_s = time.process_time()
        self._next_tell_s = TELL_INTERVAL_S

    def run(self) -> None:
        while not self._over.wait(LOOK_INTERVAL_S):
            row = self._newest_row()
            if row is not None:
                self._sample(row)

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _newest_row(self) -> dict[str, Any] | None:
        """Returns the newest complete training row since the last call."""
        path = self.run_dir / METRICS
        if not path.exists():
            return None
        with path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read().split(b"\n")[:-1]
        self._offset += sum(len(line) + 1 for line in lines)
        rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
        return rows[-1] if rows else None

    def _sample(self, row: dict[str, Any]) -> None:
        for name, pid in _processes(self.run_dir / PROCESSES).items():
            used_s = cpu_seconds(pid)
            if used_s is not None:  # a role that has ended keeps its last value
                self._cpu_s[name.partition("-")[0], pid] = used_s
        cpu_s = {OWN: time.process_time() - self._own_start_s}
        for (kind, _), used_s in self._cpu_s.items():
            cpu_s[kind] = cpu_s.get(kind, 0.0) + used_s
        self.samples.append(UsageSample(row["env_steps"], row["wall_s"], cpu_s, busy_seconds()))
        if row["wall_s"] >= self._next_tell_s:
            self._next_tell_s = row["wall_s"] + TELL_INTERVAL_S
            self.report(row)


@dataclass(frozen=True, slots=True)
class Watched:
    """A training that is over, and the samples of its use of processors."""

    result: RunResult
    samples: list[UsageSample]


@contextlib.contextmanager
def watched_training(
    config: TrainConfig, report: Callable[[dict[str, Any]], None], output: TextIO
) -> Iterator[Watched]:
    """Trains without evaluation. The run folder is removed when the block ends, unless `run.dir` is set.

    `report` gets rows of the metrics, `output` the messages of the run.
    """
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        run_dir = Path(config.run.dir or f"{folder}/run")
        watch = UsageWatch(run_dir, report)
        watch.start()
        try:
            result = train(replace(config, **{"evaluation.episodes": 0, "run.dir": str(run_dir)}), output=output)
        finally:
            watch.stop()
        yield Watched(result, watch.samples)


def usage(samples: list[UsageSample], num_cores: int, *, whole_machine: bool) -> Usage | None:
    """Returns the usage per step after the warm-up; None if there are too few samples.

    Without `whole_machine` the use by other programs is ignored: a run in one process uses one core.
    """
    begun = [sample for sample in samples if sample.env_steps > 0]
    warm = [sample for sample in begun if sample.wall_s >= begun[0].wall_s + WARM_UP_S]
    chosen = warm if warm and warm[-1].wall_s - warm[0].wall_s >= WARM_UP_S else begun
    if not chosen or chosen[-1].env_steps == chosen[0].env_steps:
        return None
    first, last = chosen[0], chosen[-1]
    scale = 1e6 / (last.env_steps - first.env_steps)
    total_us = scale * num_cores * (last.wall_s - first.wall_s)
    roles_us = {kind: scale * (used_s - first.cpu_s.get(kind, 0.0)) for kind, used_s in last.cpu_s.items()}
    own_us = sum(roles_us.values())
    busy_us = scale * (last.busy_s - first.busy_s) if whole_machine else own_us
    return Usage(total_us, roles_us, max(busy_us - own_us, 0.0), max(total_us - max(busy_us, own_us), 0.0))


def _processes(path: Path) -> dict[str, int]:
    """Returns the pids of the roles of this host by name; empty for a run in one process."""
    try:
        entries = json.loads(path.read_bytes()).items()
        return {name: int(entry["pid"]) for name, entry in entries if "host" not in entry}
    except FileNotFoundError:
        return {}


def cpu_seconds(pid: int) -> float | None:
    """Returns the processor time of the process `pid`; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Returns the total non-idle time of the cores this process may use, since boot."""
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in mine:
            user, nice, system, _idle, _waiting, *rest = map(int, fields[:8])  # rest: interrupts, stolen by the host
            ticks += user + nice + system + sum(rest)
    return ticks / os.sysconf("SC_CLK_TCK")
