"""The supervisor: starts the roles and replaces those that die or hang, unless a restart cannot help.

The coordinator calls `look` several times a second. While the run lives, `processes.json` in the run folder maps the
roles to their processes.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from echelon.disk import open_regular, put_file
from echelon.engines.inline import InlineEngine
from echelon.engines.local import LocalEngine
from echelon.engines.process import CRASHES, Exit, Failure, ProcessSpec
from echelon.errors import ConfigError, DivergedError, EnvError, RunError
from echelon.memory_check import num_out_of_memory
from echelon.roles.context import Context
from echelon.roles.gauge import PHASES, Gauge
from echelon.world.node import Node

PROCESSES = "processes.json"
KINDS = {"inference": "inference server", "shards": "shard server"}  # as they are shown
COMPILE_S = 120.0  # hang timeout of a learner that compiles, at least
AWAY_S = 1.0  # the part of a gap between two calls of `look` beyond this is taken for a suspension and ignored
STACK_TIMEOUT_S = 2.0  # a hung role prints its stack within this time, unless it is suspended or stuck in the kernel
LEAVE_S = 2.0  # how long the other learners may go without progress, after one of them has exited
LOG_TAIL_BYTES = 6_000
EXCHANGE = "roles/learners.py"  # appears in the stack of a learner that waits for the others
FATAL = {"ConfigError": ConfigError, "EnvError": EnvError, "DivergedError": DivergedError}
DEATH_WINDOW_S = 300.0  # window in which deaths by outside signals, e.g. for lack of memory, are counted
NUM_IMMEDIATE_RESTARTS = 3  # restarts without delay after such deaths; the delay of each further restart doubles
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
HUNG = "hung"  # the time that an actor spends in a call that has not returned for HUNG_S; no phase has counted it yet
HUNG_S = 5.0


@dataclass(slots=True)
class SupervisedRole:
    """The supervisor's state of one role."""

    spec: ProcessSpec
    context: Context
    kind: str
    gauge: Gauge
    progressed_at: float  # time of its last progress, or of its start
    progress: int = 0  # the value of its gauge at that time
    silent_s: float = 0.0  # without progress, when the supervisor last looked
    past_phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PHASES, HUNG), 0.0))
    failures: collections.deque[tuple[float, str]] = field(default_factory=lambda: collections.deque(maxlen=16))
    deaths: collections.deque[float] = field(default_factory=lambda: collections.deque(maxlen=64))  # by outside signals
    doomed: bool = False  # killed by the supervisor; its exit is not reported yet

    @property
    def has_begun(self) -> bool:
        return self.progress > 0

    @property
    def phases(self) -> dict[str, float]:
        """The seconds that the role spent in each phase, including its earlier incarnations."""
        is_hung = self.kind == "actor" and self.silent_s > HUNG_S
        phases = {**self.gauge.phases(self.context.incarnation), HUNG: self.silent_s if is_hung else 0.0}
        return {phase: seconds + self.past_phases[phase] for phase, seconds in phases.items()}


class Supervisor:
    """Keeps every role of a run alive.

    Several learners are restarted together: they wait for each other in the middle of a batch, so when one exits the
    others cannot finish theirs. They exit, the first one after it has saved a checkpoint, however slow the disk is; a
    learner that makes no progress for LEAVE_S is killed. When all have exited, all are started again. For the hang
    timeout, progress of one learner counts for all, because a learner that waits for another makes none. Failures are
    also counted together.
    """

    def __init__(
        self, context: Context, engine: LocalEngine | InlineEngine, world: Node, report: Callable[[str], None]
    ) -> None:
        self.context, self.config = context, context.train.supervision
        self.engine, self.world, self.report = engine, world, report
        self.members: dict[str, SupervisedRole] = {}
        self.restarts = 0
        learners = context.train.learner_names
        self.together = learners if len(learners) > 1 else []  # roles that are restarted together
        self._gone: dict[str, Exit] = {}  # their exits, until all have exited
        self._failures = collections.deque[tuple[float, str]](maxlen=16)  # of all of them
        self._deaths = collections.deque[float](maxlen=64)
        self._due: list[tuple[float, str]] = []  # delayed restarts: time and role
        self._reported = ""  # the last reported `ended_with`: a cause shared by several roles is reported once
        self._num_out_of_memory = num_out_of_memory()
        self._exit_deadline = math.inf  # from then on, remaining learners that make no progress are killed
        self._looked_at = time.monotonic()
        self._recorded: dict[str, Any] = {}

    def start(self, name: str, kind: str, index: int, *, nice: int = 0) -> None:
        context = replace(self.context, name=name, index=index)
        here = self.engine.is_here(name)
        log = "" if here else str(self._log(name))
        spec = ProcessSpec(name, f"echelon.roles.{kind}:{kind}", context.to_config(keep_objects=here), log, nice)
        gauge = Gauge(context.session, name)
        self.members[name] = SupervisedRole(spec, context, kind, gauge, time.monotonic())
        if name in self.together:
            self.members[name].failures, self.members[name].deaths = self._failures, self._deaths
        self.engine.start(spec)

    def replace(self, gone: Exit) -> None:
        """Restarts a role that exited, or all learners if it is one of several; raises if a restart cannot help."""
        if gone.is_final:
            self.members.pop(gone.name, None)
            self._due = [one for one in self._due if one[1] != gone.name]
        elif gone.is_move:
            self._restart(gone.name)
        elif gone.name in self.together:
            self._lose(gone)
        else:
            self._judge_exit(gone)
            self._begin_again(gone, [gone.name], "it")

    def _begin_again(self, gone: Exit, names: Sequence[str], whom: str) -> None:
        """Restarts the roles; after a delay if `gone` was killed by outside signals repeatedly."""
        member, now, often = self.members[gone.name], time.monotonic(), ""
        if not gone.failure and gone.signal and gone.signal not in CRASHES and not (member.doomed or gone.is_reported):
            member.deaths.append(now)
            count = sum(now - then <= DEATH_WINDOW_S for then in member.deaths)
            often = f", {count} times within {DEATH_WINDOW_S / 60:g} minutes" if count > 1 else ""
            often += self._why_outside()
        pause_s = 0.0
        if often and count > NUM_IMMEDIATE_RESTARTS:
            pause_s = min(FIRST_PAUSE_S * 2.0 ** (count - NUM_IMMEDIATE_RESTARTS - 1), LONGEST_PAUSE_S)
        if not gone.ended_with or gone.ended_with != self._reported:
            self._reported, self.restarts = gone.ended_with, self.restarts + 1
            what = f"{gone.ended_with}, and every role with it" if gone.ended_with else self._describe(gone)
            later = f" in {pause_s:g} s" if pause_s else ""
            if not gone.is_reported:
                self.report(f"{what}{often}; starting {'them' if gone.ended_with else whom} again{later}")
        for name in names:
            if pause_s:
                self._due.append((now + pause_s, name))
            else:
                self._restart(name)

    def _describe(self, gone: Exit) -> str:
        place = self.engine.place(gone.name)
        return f"{gone.name} (process {gone.pid}{f' on host {place}' if place else ''}) {gone.cause}"

    def _why_outside(self) -> str:
        """Returns why processes were killed from outside, if the kernel's out-of-memory counter shows it, else ""."""
        before, self._num_out_of_memory = self._num_out_of_memory, num_out_of_memory()
        if self._num_out_of_memory <= before:
            return ""
        return ", because memory ran out (lower --actors, --envs-per-actor or --replay.capacity)"

    def _lose(self, gone: Exit) -> None:
        """Handles the exit of one of several learners; restarts all when the last has exited."""
        if gone.failure is not None and gone.failure.kind in FATAL:
            self._judge_exit(gone)
        self._gone[gone.name] = gone
        if gone.code or gone.signal or gone.name == self.together[0]:  # otherwise it exited normally
            self._exit_deadline = min(self._exit_deadline, time.monotonic() + LEAVE_S)
        if len(self._gone) < len(self.together):
            return
        first = min(self._gone.values(), key=_is_consequence)
        self._gone, self._exit_deadline = {}, math.inf
        self._judge_exit(first)
        self._begin_again(first, self.together, f"all {len(self.together)} learners")

    def _judge_exit(self, gone: Exit) -> None:
        failure = gone.failure
        if failure is None and (gone.signal in CRASHES or not gone.signal):
            text = _tail(self._log(gone.name), 0)
            where = "the end of its log follows" if text else "its log is empty"
            failure = Failure(gone.cause, where, text, expected=False)
        if failure is not None:
            if place := self.engine.place(gone.name):
                failure = replace(failure, message=f"{gone.name} on host {place}: {failure.message}")
            self._judge(self.members[gone.name], failure)

    def _restart(self, name: str) -> None:
        member = self.members[name]
        member.past_phases = member.phases
        member.context = replace(member.context, incarnation=member.context.incarnation + 1)
        member.spec = replace(member.spec, config=member.context.to_config(keep_objects=False))
        member.progressed_at, member.progress, member.silent_s, member.doomed = time.monotonic(), 0, 0.0, False
        self.engine.start(member.spec)

    def _judge(self, member: SupervisedRole, failure: Failure) -> None:
        """Raises if a restart cannot help: the error is in FATAL, or the same failure repeats."""
        if failure.kind in FATAL:
            raise FATAL[failure.kind](failure.message)
        now, text = time.monotonic(), f"{failure.kind}: {failure.message}"
        same = f"{failure.kind} {origin_of(failure)}"  # without the message, which may contain changing numbers
        member.failures.append((now, same))
        recent = [t for t, what in member.failures if what == same and now - t <= self.config.failure_window_s]
        if len(recent) >= self.config.max_same_failures:
            name = member.spec.name
            who, last = ("the learners", f" ({name} was the last)") if name in self.together else (name, "")
            raise RunError(
                f"{who} failed {len(recent)} times within {self.config.failure_window_s:g} s with the same error{last}"
                f", so the run ends. {text}\n\n{failure.traceback}"
            )

    def look(self) -> None:
        """Kills roles that make no progress, after printing their stacks, and makes delayed restarts.

        A killed role is restarted when its exit is reported.
        """
        now = time.monotonic()
        for when, name in [one for one in self._due if one[0] <= now]:
            self._due.remove((when, name))
            self._restart(name)
        self._forgive(now)
        self._look_at_progress(now)
        hung: list[tuple[list[str], float]] = []
        for names in [*([name] for name in self.members if name not in self.together), self.together]:
            living = [name for name in names if self.engine.pid(name) is not None and not self.members[name].doomed]
            if living and names is self.together and self._exit_deadline < math.inf:  # they are already exiting
                if now > self._exit_deadline:
                    self._kill([name for name in living if now - self.members[name].progressed_at > LEAVE_S])
            elif living and (silent_s := self._silent_s(names, now)):
                hung.append((living, silent_s))
        stacks = self._stacks([name for names, _ in hung for name in names]) if hung else {}
        for names, silent_s in hung:
            self._end_hung(names, silent_s, stacks)
        self._record()
        self._looked_at = time.monotonic()

    def _forgive(self, now: float) -> None:
        """Excludes time during which this process was suspended, perhaps with all others, from the hang timeouts."""
        away_s = now - self._looked_at - AWAY_S
        if away_s > 0.0:
            self._exit_deadline += away_s
            for member in self.members.values():
                member.progressed_at = min(now, member.progressed_at + away_s)

    def _silent_s(self, names: Sequence[str], now: float) -> float:
        """Returns how long roles that are watched together have made no progress, or 0 if within the hang timeout."""
        group = [self.members[name] for name in names]
        silent_s = now - max(one.progressed_at for one in group)  # including roles that have finished and are closing
        timeout_s = self.config.hang_timeout_s
        compiling = names[0] in self.context.train.learner_names and self.context.train.learner.compile
        if compiling or not all(one.has_begun for one in group):
            timeout_s = max(self.config.start_timeout_s, COMPILE_S if compiling else 0.0)
        return silent_s if silent_s > timeout_s else 0.0

    def _look_at_progress(self, now: float) -> None:
        for member in self.members.values():
            progress = member.gauge.progress(member.context.incarnation)
            if progress != member.progress or not self.engine.has_current_gauge(member.spec.name):
                member.progress, member.progressed_at = progress, now
            if member.has_begun and self.engine.pid(member.spec.name) is not None:
                member.silent_s = now - member.progressed_at

    def _end_hung(self, names: Sequence[str], silent_s: float, stacks: dict[str, str]) -> None:
        """Kills hung roles; of several learners, only those that the others wait for."""
        shown = {name: stacks[name] for name in names if name in stacks}  # of this host
        hung = [name for name, stack in shown.items() if not stack]  # suspended, or stuck in the kernel
        hung = hung or [name for name, stack in shown.items() if EXCHANGE not in stack] or list(names)
        for name in hung:
            place = self.engine.place(name)
            unknown = f"(in logs/{name}.log)" if place else "(none: it is suspended, or stuck in the kernel)"
            stack = stacks.get(name) or unknown
            self.report(f"{name} made no progress for {silent_s:.1f} s; killing it. Its stack:\n{stack}")
        self._kill(hung)
        if len(hung) < len(names):
            self._exit_deadline = time.monotonic() + LEAVE_S

    def _stacks(self, names: Sequence[str]) -> dict[str, str]:
        """Returns the stacks of roles, which they print to their logs on SIGUSR1; "" for a role that prints none."""
        logs = {name: self._log(name) for name in names if not self.engine.place(name)}
        sizes = seen = {name: _size(log) for name, log in logs.items()}
        for name in names:
            self.engine.signal(name, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_TIMEOUT_S
        while time.monotonic() < deadline:
            time.sleep(0.02)
            last, seen = seen, {name: _size(log) for name, log in logs.items()}
            if all(seen[name] == last[name] > sizes[name] for name in logs):  # all logs have grown and stopped growing
                break
        return {name: _tail(log, sizes[name]) for name, log in logs.items()}

    def _kill(self, names: Sequence[str]) -> None:
        for name in names:
            self.engine.signal(name, signal.SIGKILL)
            self.members[name].doomed = True

    def release(self, names: Collection[str]) -> None:
        """Asks roles to stop, and does not replace any of them from now on: the training is complete."""
        self._due, self.together = [], []
        for name in names:
            if name in self.world.members:
                self.world.post(name, "stop")

    def stop(self, timeout_s: float) -> None:
        """Asks every role to stop, and kills the roles that have not exited after `timeout_s`."""
        try:
            for name in self.members:
                if name in self.world.members:
                    self.world.post(name, "stop")
                elif timeout_s and self.engine.pid(name) is not None:
                    self.engine.signal(name, signal.SIGKILL)  # still starting: it cannot receive messages
            self.engine.close(timeout_s)
            self.world.drain()
        finally:
            with contextlib.suppress(OSError):  # it is not there, or the disk is read-only
                (self.context.run_dir / PROCESSES).unlink()

    def shares(self) -> dict[str, dict[str, float]]:
        """Returns the share of time in each phase, for every role except the evaluator; HUNG only of roles that hung.

        Roles that share a process share its time, so that the shares of all of them sum to 1.
        """
        phases = {name: member.phases for name, member in self.members.items() if name != "evaluator"}
        seconds = {name: sum(own.values()) for name, own in phases.items()}
        if self.context.shares_process:
            seconds = dict.fromkeys(seconds, sum(seconds.values()))
        return {
            name: {phase: value / seconds[name] for phase, value in own.items() if value or phase != HUNG}
            for name, own in phases.items()
            if sum(own.values()) > 0
        }

    def starting(self) -> str:
        """Returns which roles have started, "learner, 3 of 14 actors", of the kinds that have not all done so.

        The evaluator is left out: the first update does not wait for it.
        """
        kinds: dict[str, list[bool]] = {}
        for member in self.members.values():
            if member.kind != "evaluator":
                kinds.setdefault(KINDS.get(member.kind, member.kind), []).append(member.has_begun)
        return ", ".join(
            kind if len(begun) == 1 else f"{sum(begun)} of {len(begun)} {kind}s"
            for kind, begun in kinds.items()
            if not all(begun)
        )

    def num_steps(self) -> int:
        """Returns the environment steps of all actors."""
        return sum(member.gauge.env_steps for member in self.members.values() if member.kind == "actor")

    def figures(self, kind: str) -> dict[str, dict[str, float]]:
        """Returns the published figures of each role of `kind` that has any."""
        shown = {name: member.gauge.figures(kind) for name, member in self.members.items() if member.kind == kind}
        return {name: figures for name, figures in shown.items() if figures}

    def _record(self) -> None:
        """Writes the process of every role to `processes.json`, if one has changed."""
        if (server_pid := self.engine.server_pid) is None:
            return
        processes: dict[str, dict[str, Any]] = {"coordinator": {"pid": os.getpid()}, "forkserver": {"pid": server_pid}}
        for name, member in self.members.items():
            if (pid := self.engine.pid(name)) is not None:
                processes[name] = {"pid": pid, "incarnation": member.context.incarnation}
                if place := self.engine.place(name):
                    processes[name]["host"] = place
        if processes != self._recorded:
            text = json.dumps(processes, indent=2) + "\n"
            with contextlib.suppress(OSError):  # a full disk does not end the training; the next `look` tries again
                put_file(self.context.run_dir / PROCESSES, text.encode(), durable=False)
                self._recorded = processes

    def _log(self, name: str) -> Path:
        return self.context.run_dir / "logs" / f"{name}.log"


def _is_consequence(gone: Exit) -> int:
    """Ranks exits of roles that are restarted together: 0 for a likely cause, more for a consequence of another."""
    if gone.signal == signal.SIGKILL:
        return 1  # killed by the supervisor or from outside
    return 2 * (gone.failure is not None and gone.failure.kind == "PeerLost") + 3 * (gone.code == 0)


def origin_of(failure: Failure) -> str:
    """Returns where an exception was raised: the last file and line of its traceback."""
    places = [line.strip() for line in failure.traceback.splitlines() if line.strip().startswith('File "')]
    return places[-1] if places else failure.message


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: Path, start: int) -> str:
    """Returns the end of the text that was written to `path` after its first `start` bytes."""
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except OSError:  # there is none
        return ""
    with open(descriptor, "rb") as file:
        file.seek(max(start, _size(path) - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace").strip()
