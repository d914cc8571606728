"""The supervisor: starts the roles and replaces those that die or hang, unless a restart cannot help.

The coordinator asks it to `look` several times a second. It keeps `processes.json` in the run folder, which says who
runs as which process while the run lives.
"""

from __future__ import annotations

import collections
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from echelon.engines.inline import InlineEngine
from echelon.engines.local import LocalEngine
from echelon.engines.process import Exit, Failure, ProcessSpec
from echelon.errors import ConfigError, DivergedError, EnvError, RunError
from echelon.roles.context import PHASES, Context
from echelon.world.node import Node

PROCESSES = "processes.json"
START_GRACE_S = 120.0  # a role that has not begun yet: imports, compilation, slow environments
STACK_TIMEOUT_S = 0.5  # a hung role's stack comes at once, or it is stopped or stuck in the kernel
LOG_TAIL_BYTES = 6_000
FATAL = {"ConfigError": ConfigError, "EnvError": EnvError, "DivergedError": DivergedError}
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)  # a process's own doing


@dataclass(slots=True)
class Member:
    """One role as the supervisor sees it."""

    spec: ProcessSpec
    context: Context
    moved: float  # when it last made progress; before it has begun, when it was started
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    past_phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    failures: collections.deque[tuple[float, str]] = field(default_factory=lambda: collections.deque(maxlen=16))
    begun: bool = False
    doomed: bool = False  # killed by us, its exit is under way


class Supervisor:
    """Keeps every role of a run alive."""

    def __init__(
        self, context: Context, engine: LocalEngine | InlineEngine, world: Node, tell: Callable[[str], None]
    ) -> None:
        self.context, self.config = context, context.train.supervision
        self.engine, self.world, self.tell = engine, world, tell
        self.members: dict[str, Member] = {}
        self.restarts = 0
        self._recorded: dict[str, Any] = {}

    def start(self, name: str, kind: str, index: int, *, nice: int = 0) -> None:
        context = replace(self.context, name=name, index=index)
        here = self.engine.is_here(name)
        log = "" if here else str(self._log(name))
        spec = ProcessSpec(name, f"echelon.roles.{kind}:{kind}", context.to_config(keep_objects=here), log, nice)
        self.members[name] = Member(spec, context, time.monotonic())
        self.engine.start(spec)

    def replace(self, gone: Exit) -> None:
        """Starts a role that ended anew; raises if that cannot help."""
        member, cause = self.members[gone.name], cause_of(gone)
        self.world.forget(gone.name, cause)
        failure = gone.failure
        if failure is None and (gone.signal in CRASHES or not gone.signal):
            failure = Failure(cause, "the end of its log follows", _tail(self._log(gone.name), 0), expected=False)
        if failure is not None:
            self._judge(member, failure)
        self.tell(f"{gone.name} (process {gone.pid}) {cause}; starting it again")
        for phase, seconds in member.phases.items():
            member.past_phases[phase] += seconds
        member.phases = dict.fromkeys(PHASES, 0.0)
        member.context = replace(member.context, incarnation=member.context.incarnation + 1)
        member.spec = replace(member.spec, config=member.context.to_config(keep_objects=False))
        member.moved, member.begun, member.doomed = time.monotonic(), False, False
        self.restarts += 1
        self.engine.start(member.spec)

    def _judge(self, member: Member, failure: Failure) -> None:
        """Ends the run if a restart cannot help: a user's mistake, or the same failure again and again."""
        if failure.kind in FATAL:
            raise FATAL[failure.kind](failure.message)
        now, text = time.monotonic(), f"{failure.kind}: {failure.message}"
        same = f"{failure.kind} {origin_of(failure)}"  # not its message, which may name a number that changes
        member.failures.append((now, same))
        recent = [t for t, what in member.failures if what == same and now - t <= self.config.failure_window_s]
        if len(recent) >= self.config.max_same_failures:
            raise RunError(
                f"{member.spec.name} failed {len(recent)} times within {self.config.failure_window_s:g} s with the "
                f"same error, so the run ends. {text}\n\n{failure.traceback}"
            )

    def look(self) -> None:
        """Kills roles whose progress stands still, after asking for their stacks; their exit then replaces them."""
        now = time.monotonic()
        for name, member in self.members.items():
            pid = self.engine.pid(name)
            if pid is None or member.doomed:
                continue
            progress = self.world.last_progress(name)
            if progress is not None and progress.pid == pid and progress.counter > 0:
                member.begun, member.moved = True, progress.changed_at
            silent_s = now - member.moved  # also of one that left the world and is just closing
            hang_timeout_s = self.config.hang_timeout_s
            compiling = name == "learner" and self.context.train.learner.compile
            if silent_s > (hang_timeout_s if member.begun and not compiling else max(hang_timeout_s, START_GRACE_S)):
                self._end_hung(name, silent_s)
                member.doomed = True
        self._record()

    def _end_hung(self, name: str, silent_s: float) -> None:
        log = self._log(name)
        size = seen = _size(log)
        self.engine.signal(name, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_TIMEOUT_S
        while time.monotonic() < deadline:
            time.sleep(0.02)
            last, seen = seen, _size(log)
            if seen == last > size:  # the dump is whole: it grew, and grows no more
                break
        stack = _tail(log, size) or "(it did not answer: stopped, or stuck in the kernel)"
        self.tell(f"{name} made no progress for {silent_s:.1f} s; killing it. It was here:\n{stack}")
        self.engine.signal(name, signal.SIGKILL)

    def stop(self, timeout_s: float) -> None:
        """Asks every role to leave, and ends those that have not after `timeout_s`."""
        try:
            for name in self.members:
                if name in self.world.members:
                    self.world.post(name, "stop")
                elif timeout_s and self.engine.pid(name) is not None:
                    self.engine.signal(name, signal.SIGKILL)  # still starting: it hears nothing
            self.engine.close(timeout_s)
            self.world.poll(0.0)  # what they told on leaving
        finally:
            (self.context.run_dir / PROCESSES).unlink(missing_ok=True)

    def shares(self) -> dict[str, dict[str, float]]:
        """For every role, the share of its time that each phase took."""
        shares = {}
        for name, member in self.members.items():
            total = {phase: member.phases[phase] + member.past_phases[phase] for phase in PHASES}
            seconds = sum(total.values())
            if seconds > 0 and name != "evaluator":
                shares[name] = {phase: value / seconds for phase, value in total.items()}
        return shares

    def _record(self) -> None:
        """Writes down who runs as which process, whenever that changed."""
        if isinstance(self.engine, InlineEngine):
            return
        processes = {"coordinator": {"pid": os.getpid()}, "forkserver": {"pid": self.engine.server_pid}}
        for name, member in self.members.items():
            if (pid := self.engine.pid(name)) is not None:
                processes[name] = {"pid": pid, "incarnation": member.context.incarnation}
        if processes != self._recorded:
            path = self.context.run_dir / PROCESSES
            temporary = path.with_name(f".{PROCESSES}")
            temporary.write_text(json.dumps(processes, indent=2) + "\n")
            os.replace(temporary, path)
            self._recorded = processes

    def _log(self, name: str) -> Path:
        return self.context.run_dir / "logs" / f"{name}.log"


def origin_of(failure: Failure) -> str:
    """Where an exception was raised: the last file and line of its traceback."""
    places = [line.strip() for line in failure.traceback.splitlines() if line.strip().startswith('File "')]
    return places[-1] if places else failure.message


def cause_of(gone: Exit) -> str:
    """How a process ended, in words."""
    if gone.failure is not None:
        return f"failed: {gone.failure.kind}: {gone.failure.message}"
    if gone.signal:
        return f"was ended by {signal.Signals(gone.signal).name}"
    return f"left with code {gone.code}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: Path, start: int) -> str:
    """What was written to `path` since it had `start` bytes, the end of it."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(start, _size(path) - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace").strip()
