"""What an engine is asked to start, what it answers, and the loop that a started process runs."""

from __future__ import annotations

import importlib
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from echelon.errors import EchelonError

STEP_TIMEOUT_S = 0.1  # the longest a role may sleep inside one step
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)  # a process's own doing
INHERITED = "-"  # as a log: what the process writes goes where its starter's output goes


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: `entry` names a function that makes its role out of `config` (plain JSON values)."""

    name: str
    entry: str  # "module:function"
    config: dict[str, Any]
    log: str = ""  # file for its standard output and errors, or INHERITED
    nice: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a role gave up: the exception it raised."""

    kind: str  # class name
    message: str
    traceback: str
    expected: bool  # one of Echelon's own errors: its message says it all


@dataclass(frozen=True, slots=True)
class Exit:
    """A process that ended: by itself (code), by a signal, or by an exception (failure)."""

    name: str
    pid: int
    code: int
    signal: int
    failure: Failure | None = None
    log: str = ""  # the end of it, where its file is on another host
    ended_with: str = ""  # what took it along, and how that ended: "the fork server (process 7) was ended by SIGKILL"
    is_reported: bool = False  # the engine has reported what took it along

    @property
    def cause(self) -> str:
        """How it ended, in words."""
        if self.ended_with:
            return f"ended, as {self.ended_with}"
        if self.failure is not None:
            return f"failed: {self.failure.kind}: {self.failure.message}"
        return how_ended(-self.signal if self.signal else self.code)


def how_ended(code: int) -> str:
    """How a process ended whose return code is `code`, as subprocess has it."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with code {code}"


class Role(Protocol):
    """What one process does, a step at a time."""

    finished: bool

    def step(self, timeout_s: float) -> bool:
        """Does one piece of work, or waits at most `timeout_s` for some; tells whether it worked."""

    def close(self) -> None: ...


class Engine(Protocol):
    """Starts and ends processes; decides nothing."""

    def start(self, spec: ProcessSpec) -> None: ...

    def exits(self) -> list[Exit]:
        """The processes that ended since the last call."""

    def pid(self, name: str) -> int | None: ...

    def signal(self, name: str, number: int) -> None: ...

    def close(self, timeout_s: float) -> None:
        """Ends what still runs: politely for `timeout_s`, then not."""


class OneHost:
    """What an engine says of other hosts where there are none."""

    def place(self, name: str) -> str:
        """The host that a role runs on; "": this one."""
        del name
        return ""

    def hears(self, name: str) -> bool:
        """Whether what a role shows is new: that of another host is not while nothing is heard of it."""
        del name
        return True

    def hosts(self) -> list[dict[str, Any]]:
        """The hosts of the run, for its summary; none where there is only this one."""
        return []

    def reports(self) -> list[tuple[str, str]]:
        """What roles of other hosts have to say to the coordinator: one of its services, and the text."""
        return []


def make_role(spec: ProcessSpec) -> Role:
    """Calls the entry of `spec`."""
    module, _, function = spec.entry.partition(":")
    entry: Callable[[dict[str, Any]], Role] = getattr(importlib.import_module(module), function)
    return entry(spec.config)


def run_role(role: Role) -> None:
    """Steps `role` until it is finished."""
    while not role.finished:
        role.step(STEP_TIMEOUT_S)


def failure_of(error: BaseException) -> Failure:
    """What is told of `error`: one of Echelon's own goes by its name in the exception tree, subclasses included."""
    known = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == EchelonError.__module__]
    text = "".join(traceback.format_exception(error))
    return Failure((known or [type(error).__name__])[0], str(error), text, bool(known))
