"""How hosts join and are lost: what the head says about missing ones, whom it refuses, what agents check and say."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable

from echelon.engines.local import LocalEngine
from echelon.engines.process import ProcessSpec
from echelon.errors import Refused
from echelon.hosts.messages import Assignment, JoinRequest
from echelon.transport.secret import SECRET_VARIABLE, is_loopback
from echelon.version import __version__

LOOK_S = 0.1
WAIT_REPORT_S = 30.0  # between two reports that hosts are missing
Reporter = Callable[[str], None]
Look = Callable[[], None]


class WaitReport:
    """Reports what the run waits for, when that changes, and from time to time that it still does."""

    def __init__(self, how: str, report: Reporter) -> None:
        """`how` says how hosts join."""
        self._how, self._report = how, report
        self._missing, self._began, self._next_at = "", time.monotonic(), 0.0

    def look(self, missing: str, without: str) -> None:
        """`missing` is what the run waits for, `without` are the options with which it starts without that."""
        now = time.monotonic()
        if missing != self._missing:
            self._missing, self._next_at = missing, now + WAIT_REPORT_S
            self._report(f"waiting for {missing}: {self._how}")
        elif now >= self._next_at:
            self._next_at += WAIT_REPORT_S
            give_up = f"Ctrl-C gives up; {without} trains without"
            self._report(f"still waiting for {missing} after {now - self._began:.0f} s ({give_up})")


def join_command(address: str) -> str:
    """Returns the command to run on another host, as far as this host can tell."""
    name, _, port = address.removeprefix("tcp://").rpartition(":")
    if is_loopback(name):
        only = "this user on this machine only; --hosts.address tcp://0.0.0.0:PORT admits other machines"
        return f"echelon host --join {name}:{port} ({only})"
    known = socket.gethostname() if name == "0.0.0.0" else name
    return f"echelon host --join {known}:{port} (with the same {SECRET_VARIABLE})"


def require_fit(request: JoinRequest) -> None:
    """Raises Refused if a host cannot take part."""
    if request.version != __version__:
        versions = f"it has Echelon {request.version} and this run has {__version__}"
        raise Refused(f"host {request.name}: {versions}; install the same version")
    if request.failure:
        raise Refused(f"host {request.name} cannot run its actors: {request.failure}")


def why_unfit(engine: LocalEngine, check: ProcessSpec, tick: Callable[[], None]) -> str:
    """Runs the head's check on this host, calling `tick` meanwhile; returns why it failed, or an empty text."""
    engine.start(check)
    while not (exits := engine.exits()):
        tick()
        select.select(engine.descriptors, [], [], LOOK_S)
    [gone] = exits
    if gone.failure is not None and gone.failure.expected:
        return gone.failure.message
    return gone.cause if gone.code or gone.signal or gone.failure else ""


def describe_wait(address: str, assignment: Assignment) -> str:
    """Returns what an agent waits for that has reached the head at `address`."""
    if not assignment.name:
        return f"reached {address}; the run is being prepared"
    more = f"; waiting for {assignment.missing}" if assignment.missing else "; the run is starting"
    return f"joined {address} as {assignment.name}{more}"


def why_lost(name: str, address: str, lease_s: float, silent_s: float, away_s: float) -> str:
    """Returns why the host `name` leaves, which has received no reply for `silent_s` and did nothing for `away_s`."""
    why = (
        f"the run at {address} has not replied for {silent_s:.0f} s: it was killed, the link is cut, or its host is "
        "down. If it is resumed, run `echelon host --join` again"
    )
    if away_s > lease_s / 2:
        why = (
            f"this agent was suspended for {away_s:.0f} s, and the run at {address} gives a host up that is silent for "
            f"{lease_s:g} s (--hosts.lease-s)"
        )
    return f"{why}. {name} has ended its actors, which the run starts elsewhere."


def own_address(head: str) -> str:
    """Returns the address of this host from which it reaches the head, at tcp://HOST:PORT."""
    name, _, port = head.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connects, but sends nothing
        probe.connect((name, int(port)))
        return str(probe.getsockname()[0])
