"""The coordinator: starts the roles, watches them, replaces the dead and the hung, keeps the record, and ends the run.

It waits for: messages of the roles and exits told by the engine. It alone decides restarts. If it dies, the fork server
ends every role; `echelon resume` goes on from the newest checkpoint.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from echelon.engines.inline import InlineEngine
from echelon.engines.local import LocalEngine
from echelon.engines.process import Exit, Failure, ProcessSpec
from echelon.errors import ConfigError, DivergedError, EnvError, RunError
from echelon.roles.context import PHASES, Context
from echelon.runs.console import Console, Status
from echelon.runs.metrics import MetricsWriter
from echelon.world.world import World

LOOP_S = 0.05
CONSOLE_INTERVAL_S = 0.25
STOP_TIMEOUT_S = 5.0
START_GRACE_S = 120.0  # a role that has not begun yet: imports, compilation, slow environments
LOG_TAIL_BYTES = 6_000
FATAL = {"ConfigError": ConfigError, "EnvError": EnvError, "DivergedError": DivergedError}


@dataclass(slots=True)
class Member:
    """One role as the coordinator sees it."""

    spec: ProcessSpec
    context: Context
    started: float
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    past_phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    failures: collections.deque[tuple[float, str]] = field(default_factory=lambda: collections.deque(maxlen=16))
    begun: bool = False
    running: bool = True


class Coordinator:
    """Runs one training from the first process to the last."""

    def __init__(
        self,
        context: Context,
        engine: LocalEngine | InlineEngine,
        world: World,
        console: Console,
        metrics: MetricsWriter,
    ) -> None:
        self.context, self.config = context, context.train
        self.engine, self.world, self.console, self.metrics = engine, world, console, metrics
        self.members: dict[str, Member] = {}
        self.row: dict[str, Any] = {}
        self.summary: dict[str, Any] | None = None
        self.evaluation: dict[str, Any] | None = None
        self.restarts = 0
        self.interrupts = 0
        self.next_console = 0.0
        self.began = time.perf_counter()
        world.serve("phases", self._on_phases)
        world.serve("train", self._on_train)
        world.serve("evaluation", self._on_evaluation)
        world.serve("message", self.console.message)
        world.serve("finished", self._on_finished)

    # What the roles tell.

    def _on_phases(self, name: str, phases: dict[str, float]) -> None:
        if name in self.members:
            self.members[name].phases = phases

    def _on_train(self, row: dict[str, Any]) -> None:
        self.row = row
        self.metrics.write({"kind": "train", **row, "time": self.shares()})

    def _on_evaluation(self, score: dict[str, Any]) -> None:
        self.evaluation = score
        steps = {"env_steps": self.row.get("env_steps", 0), "wall_s": self.row.get("wall_s", 0.0)}
        self.metrics.write({"kind": "evaluation", **steps, **score})

    def _on_finished(self, summary: dict[str, Any]) -> None:
        self.summary = summary

    # Starting, watching, replacing.

    def run(self) -> dict[str, Any]:
        """Trains until the learner says that it is done; returns the summary's figures."""
        self._start("learner", "learner", 0)
        for index in range(self.config.actor.num_actors):
            self._start(f"actor-{index}", "actor", index)
        if self.config.evaluation.interval_s > 0:
            self._start("evaluator", "evaluator", 0, nice=10)
        previous = signal.getsignal(signal.SIGINT)
        terminate = signal.getsignal(signal.SIGTERM)
        with contextlib.suppress(ValueError):  # not the main thread: signals are somebody else's
            signal.signal(signal.SIGINT, self._on_interrupt)
            signal.signal(signal.SIGTERM, self._on_interrupt)
        try:
            self._loop()
        finally:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGINT, previous)
                signal.signal(signal.SIGTERM, terminate)
            self._stop_all()
        assert self.summary is not None
        return self.summary

    def _on_interrupt(self, number: int, frame: object) -> None:
        del number, frame
        self.interrupts += 1
        if self.interrupts == 1:
            self.console.message("stopping: writing the final checkpoint (interrupt again to leave at once)")
            self.world.post("learner", "stop")
        else:
            raise KeyboardInterrupt

    def _loop(self) -> None:
        next_look = 0.0
        while self.summary is None:
            if isinstance(self.engine, InlineEngine):
                while self.engine.turn() and time.perf_counter() < next_look:
                    pass
                self.world.poll(0.0)
            else:
                self.world.poll(LOOP_S, [self.engine.descriptor])
            next_look = time.perf_counter() + LOOP_S
            for gone in self.engine.exits():
                self._on_exit(gone)
            self._watch()
            self._show()
        self._show(force=True)

    def _start(self, name: str, kind: str, index: int, *, nice: int = 0) -> None:
        context = replace(self.context, name=name, index=index)
        inline = isinstance(self.engine, InlineEngine)
        log = "" if inline else str(self.context.run_dir / "logs" / f"{name}.log")
        entry = f"echelon.roles.{kind}:{kind}"
        spec = ProcessSpec(name, entry, context.to_config(keep_objects=inline), log, nice)
        self.members[name] = Member(spec, context, time.monotonic())
        self.engine.start(spec)

    def _restart(self, member: Member) -> None:
        context = replace(member.context, incarnation=member.context.incarnation + 1)
        member.context = context
        member.spec = replace(member.spec, config=context.to_config(keep_objects=False))
        member.started, member.begun = time.monotonic(), False
        for phase, seconds in member.phases.items():
            member.past_phases[phase] += seconds
        member.phases = dict.fromkeys(PHASES, 0.0)
        self.restarts += 1
        self.engine.start(member.spec)

    def _on_exit(self, gone: Exit) -> None:
        member = self.members[gone.name]
        if gone.code == 0:
            member.running = False
            if gone.name == "learner" and self.summary is None:
                self.world.poll(0.5)  # its last words may still be under way
            return
        self.world.forget(gone.name, _cause(gone))
        if gone.failure is None:
            again = f"{_cause(gone)}; starting it again"
            self.console.message(f"{gone.name} (process {gone.pid}) {again}")
        else:
            self._judge(member, gone.failure)
            self.console.message(f"{gone.name} failed: {gone.failure.kind}: {gone.failure.message}; starting it again")
        self._restart(member)

    def _judge(self, member: Member, failure: Failure) -> None:
        """Ends the run if a restart cannot help: a user's mistake, or the same exception again and again."""
        if failure.kind in FATAL:
            raise FATAL[failure.kind](failure.message)
        supervision, now = self.config.supervision, time.monotonic()
        text = f"{failure.kind}: {failure.message}"
        member.failures.append((now, text))
        recent = [t for t, what in member.failures if what == text and now - t <= supervision.failure_window_s]
        if len(recent) >= supervision.max_same_failures:
            raise RunError(
                f"{member.spec.name} failed {len(recent)} times within {supervision.failure_window_s:g} s with the "
                f"same error, so the run ends. {text}\n\n{failure.traceback}"
            )

    def _watch(self) -> None:
        """Kills roles whose progress stands still, after asking for their stacks; their exit then restarts them."""
        now = time.monotonic()
        for name, member in self.members.items():
            if not member.running or self.engine.pid(name) is None:
                continue
            progress = self.world.last_progress(name)
            if progress is not None and progress.pid == self.engine.pid(name) and progress.counter > 0:
                member.begun = True
                silent_s = now - progress.changed_at
            else:
                silent_s = now - member.started
            hang_timeout_s = self.config.supervision.hang_timeout_s
            limit_s = hang_timeout_s if member.begun else max(hang_timeout_s, START_GRACE_S)
            if silent_s > limit_s:
                self._end_hung(name, silent_s)

    def _end_hung(self, name: str, silent_s: float) -> None:
        log = self.context.run_dir / "logs" / f"{name}.log"
        size = log.stat().st_size if log.exists() else 0
        self.engine.signal(name, signal.SIGUSR1)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and _size(log) == size:
            time.sleep(0.02)
        time.sleep(0.05)  # let the rest of the dump follow its first line
        stack = _tail(log, size)
        self.console.message(f"{name} made no progress for {silent_s:.1f} s; killing it. It was here:\n{stack}")
        pid = self.engine.pid(name)
        self.engine.signal(name, signal.SIGKILL)
        while self.engine.pid(name) == pid:
            for gone in self.engine.exits():
                self._on_exit(gone)
            self.world.poll(LOOP_S)

    def _stop_all(self) -> None:
        for name, member in self.members.items():
            if member.running and name in self.world.members:
                self.world.post(name, "stop")
        if isinstance(self.engine, InlineEngine):
            self.engine.close(0.0)
        else:
            self.engine.close(STOP_TIMEOUT_S)

    # What the user sees.

    def shares(self) -> dict[str, dict[str, float]]:
        """For every role, the share of its time that each phase took."""
        shares = {}
        for name, member in self.members.items():
            total = {phase: member.phases[phase] + member.past_phases[phase] for phase in PHASES}
            seconds = sum(total.values())
            if seconds > 0 and name != "evaluator":
                shares[name] = {phase: value / seconds for phase, value in total.items()}
        return shares

    def _show(self, *, force: bool = False) -> None:
        now = time.perf_counter()
        if now < self.next_console and not force:
            return
        self.next_console = now + CONSOLE_INTERVAL_S
        row, stop = self.row, self.config.stop
        bounded = bool(stop.steps or stop.minutes)
        self.console.update(
            Status(
                fraction=row.get("progress", 0.0) if bounded else None,
                env_steps=row.get("env_steps", 0),
                steps_per_s=row.get("env_steps_per_s", 0.0),
                episodes=row.get("episodes", 0),
                return_mean=row.get("return_mean"),
                evaluation_return=self.evaluation["return_mean"] if self.evaluation else None,
                lag_mean=row.get("lag_mean", 0.0),
                lag_max=row.get("lag_max", 0),
                updates=row.get("updates", 0),
                wall_s=time.time() - self.context.started_at,
                dropped=row.get("dropped", 0),
                roles=self.shares(),
            )
        )


def _cause(gone: Exit) -> str:
    if gone.signal:
        return f"was ended by {signal.Signals(gone.signal).name}"
    return f"left with code {gone.code}"


def _size(path: Path) -> int:
    return os.stat(path).st_size if path.exists() else 0


def _tail(path: Path, start: int) -> str:
    """What was written to `path` since it had `start` bytes, the end of it."""
    if not path.exists():
        return "(no log)"
    with path.open("rb") as file:
        file.seek(max(start, _size(path) - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace").strip() or "(it did not answer: stopped, or stuck in the kernel)"


