"""`echelon train … --seeds 0-4 --jobs 2`: one training per seed, each in a process of its own, and a summary of all.

A training is `echelon train … --seed S --run-dir GROUP/seed-S`; what it prints goes to GROUP/seed-S.log. The first
Ctrl-C stops the trainings gracefully, the second immediately. If this process is killed, the kernel sends SIGTERM to
the trainings, which then stop gracefully, too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from echelon.cli.main import main
from echelon.config import TrainConfig
from echelon.control_groups import CORES, num_cores
from echelon.errors import ConfigError, escaped_lines
from echelon.interrupts import Interrupts
from echelon.names import parse_call, short_name
from echelon.roles.plan.start import check_stop
from echelon.runs.folder import check_new, default_run_dir, make_unique
from echelon.runs.records import CRASHED, RunRecord, is_run, read_run
from echelon.runs.seed_summary import outcome_text, seed_table, write_seed_summary
from echelon.runs.tables import return_text, time_text

MAX_SEEDS = 1000
LOOK_S, LINE_INTERVAL_S, REDRAW_INTERVAL_S = 0.1, 10.0, 1.0
KILL_S = 10.0  # from the second Ctrl-C to SIGKILL
PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Job:
    """The training of one seed."""

    seed: int
    run_dir: Path
    process: subprocess.Popen[bytes] | None = None
    code: int | None = None
    status: str = "not started"
    error: str = ""

    @property
    def log(self) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}.log")


def parse_seeds(text: str) -> list[int]:
    """Returns the seeds of a list such as 0-4,7, in order; raises ConfigError if it is not one."""
    seeds: list[int] = []
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"--seeds {text} is not a list of seeds: {part!r}. Write 0-4 or 0,1,7 or 0-4,7.")
        begin, end = int(first), int(last or first)
        if end < begin or end - begin >= MAX_SEEDS:
            raise ConfigError(f"--seeds {text}: {part} must go upwards, over at most {MAX_SEEDS} seeds.")
        seeds += range(begin, end + 1)
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"--seeds {text} names a seed twice: two runs would be identical. Remove one of them.")
    return seeds


def parse_jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--jobs {text} must be a whole number of at least 1: trainings at a time.")
    return int(text)


def check_seeds(config: TrainConfig, num_jobs: int, callbacks: Sequence[str]) -> None:
    """Raises ConfigError if trainings with `config` cannot follow each other, or run beside each other."""
    if config.has_hosts:
        raise ConfigError(
            f"--seeds trains on this host only, not with --engine {config.engine}: the agents of other hosts leave "
            "after one run. Start a training per seed, each with --seed S."
        )
    for path, address in (("acting.address", config.acting.address), ("replay.address", config.replay.address)):
        port = address.rpartition(":")[2]
        if num_jobs > 1 and address.startswith("tcp://") and port != "0":
            raise ConfigError(f"{path}={address}: {num_jobs} trainings cannot share port {port}. Use port 0, any free.")
    for call in map(parse_call, callbacks):
        port = call.kwargs.get("port", *call.args[:1])
        if num_jobs > 1 and call.path.endswith(":Prometheus") and port:
            raise ConfigError(
                f"--callback {call.text}: {num_jobs} trainings cannot share port {port}. Use port=0, any free; the log "
                "of each seed shows it."
            )


def group_folder(config: TrainConfig, seeds_text: str, run_dir: str, *, may_exist: bool) -> Path:
    """Creates and returns the folder of all runs."""
    if not run_dir:
        env, seeds = short_name(config.env.id), f"seeds{seeds_text.replace(' ', '')}"[:40]
        return make_unique(default_run_dir(config.preset, env, seeds)).absolute()
    path = Path(run_dir)
    if is_run(path):
        raise ConfigError(
            f"--run-dir {path} is the folder of one run. With --seeds, name a new folder for all of them."
        )
    if not may_exist:
        check_new(path)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {path} cannot be created: {error}. Choose another --run-dir.") from error
    return path.absolute()


@dataclass
class Seeds:
    """Trains the seeds of `jobs`, `num_jobs` at a time."""

    arguments: list[str]
    jobs: list[Job]
    num_jobs: int
    began: float = field(default_factory=time.monotonic)
    next_line: float = 0.0
    stopped_by: int = 0  # the signal that stops all of them, if one has come

    def run(self) -> None:
        """Returns when all trainings have ended; raises KeyboardInterrupt on the second signal."""
        is_live = sys.stdout.isatty()
        self.next_line = self.began + (REDRAW_INTERVAL_S if is_live else LINE_INTERVAL_S)
        try:
            with Interrupts() as interrupts:
                while self._start() or self._running():
                    if interrupts.came and not self.stopped_by:
                        self.stopped_by = interrupts.number
                        self._say(f"stopping {len(self._running())} trainings; Ctrl-C again stops them immediately")
                        self._signal(signal.SIGINT)
                    self._reap()
                    self._show(is_live)
                    time.sleep(LOOK_S)
        except BaseException:
            self._end_now()
            raise

    def _running(self) -> list[Job]:
        return [job for job in self.jobs if job.process is not None and job.code is None]

    def _start(self) -> bool:
        """Starts trainings while there is room; returns whether some are left."""
        waiting = [job for job in self.jobs if job.process is None]
        if self.stopped_by:
            return False
        for job in waiting[: self.num_jobs - len(self._running())]:
            job.process = self._popen(job)
            job.status = "started"
            self._say(f"seed {job.seed}: training in {job.run_dir}")
        return any(job.process is None for job in self.jobs)

    def _popen(self, job: Job) -> subprocess.Popen[bytes]:
        words = [*self.arguments, "--seed", str(job.seed), "--run-dir", str(job.run_dir)]
        root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
        path = os.pathsep.join([root, *(entry or os.getcwd() for entry in sys.path)])
        share = {CORES: str(max(1, num_cores() // self.num_jobs))} if self.num_jobs > 1 else {}
        with job.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "echelon.cli.seeds", str(os.getpid()), "train", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches it through this process only
                env={**os.environ, **share, "PYTHONPATH": path},
            )

    def _reap(self) -> None:
        for job in self._running():
            assert job.process is not None
            job.code = job.process.poll()
            if job.code is None:
                continue
            record = read_run(job.run_dir) if is_run(job.run_dir) else RunRecord(job.run_dir, CRASHED, seed=job.seed)
            was_stopped = record.status == "stopped" or (self.stopped_by and record.status == CRASHED)
            job.status = "stopped" if was_stopped else record.status if job.code == 0 else "failed"
            if job.status in ("failed", CRASHED):
                job.error = _error_of(job)
            figures = f"return {return_text(record.return_mean)}, {record.env_steps or 0:,.0f} steps"
            count = sum(other.code is not None for other in self.jobs)
            status, took = outcome_text(job.status, record), time_text(record.wall_s)
            self._say(f"seed {job.seed}: {status}, {figures} in {took} ({count} of {len(self.jobs)})")
            if job.error:
                self._say(job.error, sys.stderr)

    def _show(self, is_live: bool) -> None:
        """Shows how far the running trainings are: a line that is overwritten, or a line every few seconds."""
        now = time.monotonic()
        if now < self.next_line:
            return
        self.next_line = now + (REDRAW_INTERVAL_S if is_live else LINE_INTERVAL_S)
        records = {job.seed: read_run(job.run_dir) if is_run(job.run_dir) else None for job in self._running()}
        if not records:
            return
        passed = time_text(now - self.began)
        if is_live:
            width = os.get_terminal_size(sys.stdout.fileno()).columns - 1 if sys.stdout.isatty() else 80
            print(f"\r\x1b[K{progress_line(passed, records, width)}", end="", flush=True)
        else:
            print(progress_line(passed, records), flush=True)

    def _say(self, text: str, stream: TextIO | None = None) -> None:
        if sys.stdout.isatty():
            print("\r\x1b[K", end="", flush=True)
        print(escaped_lines(text), file=stream or sys.stdout, flush=True)

    def _signal(self, number: signal.Signals) -> None:
        for job in self._running():
            assert job.process is not None
            job.process.send_signal(number)

    def _end_now(self) -> None:
        """Ends every training: by a second signal, then by SIGKILL; nothing is left running."""
        self._signal(signal.SIGINT)
        deadline = time.monotonic() + KILL_S
        for job in self._running():
            assert job.process is not None
            try:
                job.code = job.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.code = job.process.wait()


def progress_line(passed: str, records: Mapping[int, RunRecord | None], width: int = sys.maxsize) -> str:
    """Returns how far the training of each seed is, as a line of at most `width` characters.

    If it would be longer, the steps are left out, then the returns, then whole seeds.
    """
    parts: list[str] = []
    for num_figures in (3, 2, 1):
        parts = [_progress(seed, record, num_figures) for seed, record in records.items()]
        if len(line := " | ".join([passed, *parts])) <= width:
            return line
    while parts and len(line) > width:
        parts.pop()
        line = " | ".join([passed, *parts, f"{len(records) - len(parts)} more"])
    return line[:width]


def _progress(seed: int, record: RunRecord | None, num_figures: int) -> str:
    """Returns the most important figures of a training."""
    if record is None or record.env_steps is None:
        return f"seed {seed} starts"
    steps, reached = f"{record.env_steps:,.0f} steps", f"return {return_text(record.return_mean)}"
    if record.progress is None:
        figures = [steps, reached]
    else:
        figures = [f"{record.progress:.0%}", *([steps] if num_figures > 2 else []), reached]
    return f"seed {seed} {', '.join(figures[:num_figures])}"


def _error_of(job: Job) -> str:
    """Returns the error of a training that failed: the end of its log, from the line that begins with `echelon: `."""
    lines = job.log.read_text(errors="replace").splitlines()
    begin = max((index for index, line in enumerate(lines) if line.startswith("echelon: ")), default=-5)
    return "\n".join([*lines[begin:][:20], f"the whole output is in {job.log}"])


def train_seeds(
    config: TrainConfig, arguments: Sequence[str], options: dict[str, str], callbacks: Sequence[str], *, resumes: bool
) -> int:
    """Trains every seed of `options`, each with `callbacks`, which are among `arguments`, too.

    Returns the exit code: 1 if a training failed; 128 + N if signal N stopped all, or one, of them.
    """
    seeds, num_jobs = parse_seeds(options["seeds"]), parse_jobs(options.get("jobs", "1"))
    check_stop(config)
    check_seeds(config, num_jobs, callbacks)
    run_dir = options.get("run-dir") or options.get("run.dir") or ""
    group = group_folder(config, options["seeds"], run_dir, may_exist=resumes)
    jobs = [Job(seed, group / f"seed-{seed}") for seed in seeds]
    if num_jobs > 1:
        cores = max(1, num_cores() // num_jobs)
        print(f"{len(seeds)} seeds, {min(num_jobs, len(seeds))} at a time, each plans for {cores} of the cores")
    trainings = Seeds(list(arguments), jobs, num_jobs)
    try:
        trainings.run()
    finally:
        for job in jobs:
            if job.code is not None and job.status == "started":
                job.status = "stopped"
        outcomes = {job.seed: (job.status, job.error) for job in jobs}
        records = {job.seed: read_run(job.run_dir) for job in jobs if is_run(job.run_dir)}
        write_seed_summary(group, outcomes, records)
    lines = ["", *seed_table(outcomes, records), "", f"runs        {group}"]
    stopped = next((job.code or 1 for job in jobs if job.status == "stopped"), 0)
    if trainings.stopped_by:
        stopped = 128 + trainings.stopped_by
    if stopped:
        lines.append(f"The same command with --auto-resume --run-dir {group} continues them.")
    print("\n".join(lines), flush=True)
    if any(job.status in ("failed", CRASHED) for job in jobs):
        return 1
    return stopped


def _child(arguments: Sequence[str]) -> int:
    """Runs the training of one seed; the kernel ends it with SIGTERM when the process of all seeds ends."""
    parent = int(arguments[0])
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        os.kill(parent, 0)
    except ProcessLookupError:  # it ended before we asked
        return 1
    return main(arguments[1:])


if __name__ == "__main__":
    sys.exit(_child(sys.argv[1:]))
