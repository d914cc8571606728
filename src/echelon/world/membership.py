"""A process as a member of its world: how it joins, how it handles deaths, how it leaves. `World` is its public form.

The node's thread is notified of deaths and of the end of the world; threads that wait receive them as errors.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from echelon.control_groups import num_cores
from echelon.errors import (
    ConfigError,
    EchelonError,
    PeerLost,
    TransportError,
    TransportTimeout,
    WorldError,
    WorldStopped,
)
from echelon.transport.channel import print_error
from echelon.transport.channel_calls import Future
from echelon.transport.secret import REMEDY
from echelon.world.directory import Member
from echelon.world.entrance import LIMITS, Entrance, enter, remove_folder, remove_folder_of
from echelon.world.functions import Scope
from echelon.world.node_thread import NodeThread
from echelon.world.rpc_group import EXPLAIN_S
from echelon.world.switchboard import Switchboard
from echelon.world.watch import BEAT_S, MemberInfo, MemberWatch

PAUSE_S = 0.001
DIRECTORY_S = 5.0  # how long a change of the directory may take to arrive
USUAL_THREADS = torch.get_num_threads()  # torch's default

_here: Membership | None = None
_lock = threading.Lock()


def membership_here() -> Membership | None:
    """Returns the Membership of this process, or None if it is in no world."""
    return _here


class Membership:
    """This process as a member: its node and the node's thread, its channels, the members it watches, its scope."""

    def __init__(self, entrance: Entrance, module: str) -> None:
        """Enters the world and returns when all ranks have joined; others may call functions beside `module`."""
        global _here
        with _lock:
            if _here is not None:
                raise WorldError(
                    f"this process is in a world already, as {_here.name!r}; it can be in one only. stop() it first."
                )
            _here = self
        try:
            self._enter(entrance, module)
        except BaseException:
            _here = None
            raise

    def _enter(self, entrance: Entrance, module: str) -> None:
        self.name, self.rank, self.timeout_s = entrance.name, entrance.rank, entrance.timeout_s
        self.scope = Scope(module)
        self.num_collective: Counter[tuple[int, ...]] = Counter()  # collective groups so far, by their ranks
        self._over: Callable[[str], BaseException] | None = None  # after the end: makes the error of each operation
        self._departed = threading.Condition()
        entered = enter(entrance)
        self._node, self._registry, self._info = entered.node, entered.registry, entered.info
        self._watch = self._registry.watch if self._registry else MemberWatch(self._on_host_death, self._node.drain)
        self._thread = NodeThread(self._node, self._watch, self._on_tick, self._on_broken)
        self._switchboard = Switchboard(self._thread, self._info, self.scope, LIMITS)
        self._node.on_lost = self._on_lost
        self._node.serve("ended", self._on_ended)
        self._beats, self._beat_at = False, 0.0
        host = self._node.member(self._node.host_name)
        if host is not None and not self._registry:
            self._beats = not self._watch.add(host, MemberInfo.of(host))
        self._thread.start()
        self._finalize = Finalize(None, lambda: self._leave(_uncaught_error()), exitpriority=100)
        try:
            self._ranked, self.world_size = self._await_all()
        except BaseException:
            self._close()
            raise
        share_cores(sum(1 for name in self._ranked if (one := self._node.member(name)) and MemberInfo.of(one).is_near))

    def _await_all(self) -> tuple[list[str], int]:
        """Waits until all ranks have joined; returns their names in order, and the number of ranks."""
        try:
            _, ranked, size = self.control("ready", self.name)
        except TransportTimeout as error:
            missing = self.explain(error, "missing")
            turned_away = self._node.num_turned_away
            secrets = f" A process was refused because its secret was another. {REMEDY}" if turned_away else ""
            raise TransportTimeout(
                f"rank {', '.join(map(str, missing))} of the world at {self._node.host_address} did not join within "
                f"{self.timeout_s:g} s.{secrets} Start it, or raise timeout_s."
            ) from None
        self.await_members(ranked)
        return ranked, size

    # Requests to others, which groups use.

    def seconds(self, timeout: float | None) -> float:
        """Returns the timeout in seconds; None and negative values stand for the world's `timeout_s`."""
        return self.timeout_s if timeout is None or timeout < 0 else timeout

    def check(self, what: str) -> None:
        """Raises if the world is over for this process.

        The error is PeerLost if the host is lost, WorldStopped if a member ended the world, WorldError if this process
        left it. `what` names the attempted operation in the error.
        """
        if self._over is not None:
            raise self._over(what)

    def begin_call(self, to: str, what: str, request: tuple[Any, ...], timeout: float | None) -> Future:
        """Sends a request to the member `to`; `what` names the request in errors."""
        self.check(what)
        seconds = self.seconds(timeout)
        deadline = time.monotonic() + seconds
        calls = self._switchboard.calls_to(to, seconds)
        try:
            return calls.begin(what, request, deadline - time.monotonic())
        except ConfigError as error:
            place = str(error).replace("message[4]", "args").replace("message[5]", "kwargs")
            raise ConfigError(place) from None

    def free(self, owner: str, number: int) -> None:
        """Releases a value that `owner` keeps for this process."""
        self._switchboard.free(owner, number)

    def control(self, function: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Calls a function of the host's registry."""
        self.check(f"{function}()")
        return self._thread.call(self._node.host_name, function, *args, timeout_s=self.seconds(timeout_s))

    def explain(self, error: EchelonError, function: str, *args: Any) -> Any:
        """Asks the host for the details of `error`; raises `error` itself if the host does not reply."""
        try:
            return self.control(function, *args, timeout_s=EXPLAIN_S)
        except EchelonError:
            raise error from None

    def await_members(self, names: Sequence[str]) -> None:
        """Waits until the local directory has `names`, which the host knows: its update may arrive after a reply."""
        deadline = time.monotonic() + DIRECTORY_S
        while any(not self.is_there(name) and not self._node.why_gone(name) for name in names):
            if self._over is not None or time.monotonic() >= deadline:
                break  # the next call raises the reason
            time.sleep(PAUSE_S)

    def is_there(self, name: str) -> bool:
        """Whether `name` is a member now."""
        return self._node.member(name) is not None

    def why_lost(self, name: str) -> str:
        """Returns why a member left, or ""; raises WorldStopped, or PeerLost for the host, if the world is over."""
        self.check("an operation")
        return "" if self._node.member(name) else self._node.why_gone(name) or "it never joined"

    # Events of other members, in the node's thread.

    def _on_lost(self, member: Member, why: str) -> None:
        try:
            if self._over is None:
                self._switchboard.lose(member, why)  # reads the last replies, which are in the dead member's folder
            if self._registry:
                self._registry.on_lost(member, why)
                remove_folder_of(MemberInfo.of(member), self._info)
            if member.name == self._node.host_name:
                text = f"was interrupted: {member.name!r}, the host, left: {why}"
                self._end(lambda what: PeerLost(f"{what} of {self.name!r} {text}."))
        finally:  # wake the waiting threads also after an error
            with self._departed:
                self._departed.notify_all()

    def _on_host_death(self, host: Member, why: str) -> None:
        self._node.lose_host(why)
        remove_folder_of(MemberInfo.of(host), self._info)

    def _on_ended(self, why: str) -> None:
        self._end(lambda what: WorldStopped(f"the world has ended while {self.name!r} was in {what}: {why}."))

    def _end(self, failure: Callable[[str], BaseException]) -> None:
        """Ends this membership: every operation raises from now on; only the first call has an effect."""
        if self._over is None:
            self._over = failure
            self._thread.fail(lambda: failure("a call to the host"))
            with self._departed:
                self._departed.notify_all()
            self._switchboard.fail(failure)

    def _on_broken(self, error: Exception) -> None:
        """Handles an error that ended the node's thread: nothing works without it, so all waits end."""
        text = f"was interrupted: the connection of {self.name!r} to its world broke: {type(error).__name__}: {error}"
        self._end(lambda what: TransportError(f"{what} {text}"))
        self._switchboard.close()

    def _on_tick(self) -> None:
        self._switchboard.tick()
        if self._beats and self._over is None and time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + BEAT_S
            host = self._node.host_name
            self._node.begin(host, "beat", (self.name,), lambda answer: self._watch.hear(host))

    # The end.

    def end(self, why: str) -> None:
        """Ends the world for all members: their blocking calls raise WorldStopped."""
        with contextlib.suppress(WorldStopped):  # caused by this call
            self.control("end", why, timeout_s=EXPLAIN_S)

    def stop(self) -> None:
        """Leaves the world; the host first waits until all other ranks have left or died.

        Until then the host serves its services and paired values, and keys and barriers work. It does not wait for
        members without a rank: their next operation raises PeerLost.
        """
        self._await_others()
        self._close()

    def _leave(self, error: BaseException | None) -> None:
        """Leaves without `stop`. If `error` is the reason, the host does not wait for the other ranks."""
        try:
            if self._over is not None:
                pass
            elif isinstance(error, SystemExit) and error.code in (0, None):
                self.end(f"{self.name!r} called exit(0)")
            elif error is None:
                self._await_others()
            elif self._registry:
                self._node.farewell = f"it ended with {type(error).__name__}: {error}"
            else:
                self.control("depart", self.name, f"it ended with {type(error).__name__}: {error}", timeout_s=EXPLAIN_S)
        except (EchelonError, WorldStopped) as late:
            print_error(f"{self.name!r} could not leave its world properly: {late}")
        self._close()

    def _await_others(self) -> None:
        """Waits, on the host, until the other ranks have left or died; after `timeout_s`, reports whom it waits for."""
        if self._registry is None:
            return
        with self._departed:
            if not self._departed.wait_for(self._is_alone, self.timeout_s):
                still_there = ", ".join(map(repr, self._others()))
                print_error(
                    f"{self.name!r}, the host of its world, waits for {still_there} to leave. Ctrl-C ends the world."
                )
                self._departed.wait_for(self._is_alone)

    def _is_alone(self) -> bool:
        return self._over is not None or not self._others()

    def _others(self) -> list[str]:
        """Returns the names of the other ranks that have not left."""
        return [name for name in self._ranked if name != self.name and self.is_there(name)]

    def _close(self) -> None:
        global _here
        with _lock:
            if _here is not self:
                return
            _here = None
        self._finalize.cancel()
        self._thread.do(lambda: self._end(lambda what: WorldError(f"{what}: {self.name!r} has left the world.")))
        self._thread.do(self._switchboard.close)
        self._thread.stop()
        self.scope.groups.clear()  # frees values and services before this object is freed
        remove_folder(Path(self._info.folder))


def _uncaught_error() -> BaseException | None:
    """Returns the error that ends this process, None if it ends normally; called at exit.

    In a child of multiprocessing the exception is still being handled. In a plain process it is not: `sys.last_value`
    holds an uncaught error, but there is no trace of `exit()`, which only a `with World(...)` block detects.
    """
    if (error := sys.exc_info()[1]) is not None:
        return error
    uncaught = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # ps1: errors do not end a prompt
    return uncaught if isinstance(uncaught, BaseException) else None


def _forget_in_fork() -> None:
    """Removes the membership in a forked child, which has none of the threads that a member needs."""
    global _here
    if _here is not None:
        name, pid = _here.name, os.getppid()
        _here._over = lambda what: WorldError(
            f"{what}: {name!r} is process {pid}, and this is a fork of it. Create a World in the process that uses it."
        )
        _here = None


os.register_at_fork(after_in_child=_forget_in_fork)


def share_cores(num_ranks: int) -> None:
    """Limits torch's threads to this process's share of the cores of `num_ranks` processes, unless the user set them.

    By default every process would use all cores, and threads that spin while they wait slow all processes down many
    times.
    """
    if num_ranks > 1 and "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() == USUAL_THREADS:
        torch.set_num_threads(max(1, num_cores() // num_ranks))
