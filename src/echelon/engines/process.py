"""The specification of a process, its exit, the interface of an engine, and the loop of a started process."""

from __future__ import annotations

import importlib
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from echelon.errors import EchelonError, user_line

STEP_TIMEOUT_S = 0.1  # the longest a role may sleep inside one step
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)  # caused by the process itself
IDLE = 20  # in place of a nice value: the process runs when no other wants its core (SCHED_IDLE)
INHERITED = "-"  # as a log: the process inherits its starter's output


Store = Callable[..., Any]  # store(operation, *args)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: `entry` names the function that creates its role from `config` (plain JSON values)."""

    name: str
    entry: str  # "module:function"
    config: dict[str, Any]
    log: str = ""  # file for its standard output and errors, or INHERITED
    nice: int = 0  # 1 to 19, or IDLE
    ends_by_signals: bool = False  # by SIGTERM and SIGHUP; roles leave these to the coordinator


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception that ended a role."""

    kind: str  # class name
    message: str
    traceback: str
    expected: bool  # one of Echelon's own errors: its message suffices without the traceback
    place: str = ""  # the line of the user's code that raised it, if one did


@dataclass(frozen=True, slots=True)
class Exit:
    """A process that ended: by itself (code), by a signal, or by an exception (failure)."""

    name: str
    pid: int
    code: int
    signal: int
    failure: Failure | None = None
    ended_with: str = ""  # what ended it: "the fork server (process 7) was ended by SIGKILL"
    is_reported: bool = False  # the engine has reported `ended_with`
    is_move: bool = False  # the engine ended it, to start it on another host
    is_final: bool = False  # it is not started again: it served a host that is lost

    @property
    def cause(self) -> str:
        """How it ended, as text."""
        if self.ended_with:
            return f"ended, as {self.ended_with}"
        if self.failure is not None:
            place = f" ({self.failure.place})" if self.failure.place else ""
            return f"failed: {self.failure.kind}: {self.failure.message}{place}"
        return how_ended(-self.signal if self.signal else self.code)


def how_ended(code: int) -> str:
    """Returns how a process with the return code `code` of subprocess ended, as text."""
    if code >= 0:
        return f"left with code {code}"
    names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
    return f"was ended by {names.get(-code, f'signal {-code}')}"


class Role(Protocol):
    """The work of one process, a step at a time."""

    finished: bool

    def step(self, timeout_s: float) -> bool:
        """Does one unit of work, or waits at most `timeout_s` for one; returns whether it worked."""

    def close(self) -> None: ...


class Engine(Protocol):
    """Starts and ends processes; the supervisor decides which."""

    def start(self, spec: ProcessSpec) -> None: ...

    def exits(self) -> list[Exit]:
        """Returns the processes that ended since the last call."""

    def pid(self, name: str) -> int | None: ...

    def signal(self, name: str, number: int) -> None: ...

    def close(self, timeout_s: float) -> None:
        """Waits `timeout_s` for the processes to leave, then kills them."""


class OneHost:
    """The part of an engine that concerns other hosts, for engines that have none."""

    def place(self, name: str) -> str:
        """Returns the host that a role runs on; "" for this one."""
        del name
        return ""

    def has_current_gauge(self, name: str) -> bool:
        """Returns whether a role's gauge is current; it is not while its host is silent."""
        del name
        return True

    def hosts(self) -> list[dict[str, Any]]:
        """Returns the hosts of the run for its summary; none if there is only this one."""
        return []

    def joined(self) -> list[int]:
        """Returns the numbers of other hosts that have joined since the last call; each needs roles of its own."""
        return []

    def share_store(self, store: Store) -> None:
        """Lets learners of other hosts use `store`, through which they find each other."""

    def reports(self) -> list[tuple[str, str]]:
        """Returns reports of roles on other hosts: the service of the coordinator that each is for, and its text."""
        return []


def make_role(spec: ProcessSpec) -> Role:
    """Creates the role of `spec` by calling its entry."""
    module, _, function = spec.entry.partition(":")
    entry: Callable[[dict[str, Any]], Role] = getattr(importlib.import_module(module), function)
    return entry(spec.config)


def run_role(role: Role) -> None:
    """Steps `role` until it is finished."""
    while not role.finished:
        role.step(STEP_TIMEOUT_S)


def failure_of(error: BaseException) -> Failure:
    """Returns the report of `error`; a subclass of one of Echelon's errors is reported by that error's name."""
    known = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == EchelonError.__module__]
    text = "".join(traceback.format_exception(error))
    return Failure((known or [type(error).__name__])[0], str(error), text, bool(known), user_line(error))
