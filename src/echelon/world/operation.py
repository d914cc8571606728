"""A running operation of a collective group, and the member that caused it to fail."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from echelon.errors import EchelonError, PeerLost, TransportError, TransportTimeout
from echelon.world.store import WorldStore

ANY_SOURCE = -1  # the peer of a recv() that accepts any sender
LOOK_S = 0.1  # how often a wait checks that all members are alive
VERDICT_S = 2.0  # after a broken connection: how long the world may take to report the lost member
REPORT_S = 1.0  # after a timeout: how long the other members may take to report that they wait too
ARRIVE_S = 0.5  # after a member left: how long what it sent before may take to complete an operation
PAUSE_S = 0.02
MISUSE = ("ProcessGroup", "No backend type")  # in the message of a torch error that is caused by wrong arguments


@dataclass(frozen=True, slots=True)
class CollectiveMembers:
    """The members of a collective group, and the rank of this process."""

    name: str
    ranks: tuple[int, ...]  # world ranks, in the order of the process group
    members: tuple[str, ...]  # their names
    rank: int  # the world rank of this process
    timeout_s: float
    backend: str = "gloo"

    def __str__(self) -> str:
        return f"the collective group of {', '.join(self.members)}"

    def inner(self, rank: int) -> int:
        """Returns the rank inside the process group of the world rank `rank`."""
        if rank not in self.ranks:
            ranks = ", ".join(map(str, self.ranks))
            raise RuntimeError(f"rank {rank} is not in {self}, which has the world ranks {ranks}.")
        return self.ranks.index(rank)


class GroupHealth:
    """Tells which members of a group were lost, by asking the world, and which ones wait, by the group's store."""

    def __init__(self, roster: CollectiveMembers, store: WorldStore, why_lost: Callable[[str], str]) -> None:
        """`why_lost(name)` returns why a member left, or ""; it raises WorldStopped after the end of the world."""
        self.roster = roster
        self.broken: EchelonError | None = None  # the error that broke the group; every later operation fails
        self._store = store
        self._why_lost = why_lost

    def lost(self, what: str) -> PeerLost | None:
        """Returns the error of the operation `what` if a member has left, else None."""
        for member in self.roster.members:
            if why := self._why_lost(member):
                return PeerLost(f"{what} in {self.roster} cannot complete: {member!r} is gone: {why}.")
        return None

    def verdict(self, what: str, error: Exception, number: int, waited_s: float) -> EchelonError:
        """Returns why `what` failed with torch's `error`: a member died, or a member did not enter the operation."""
        deadline = time.monotonic() + (0.0 if waited_s >= self.roster.timeout_s else VERDICT_S)
        while (lost := self.lost(what)) is None and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        if lost is not None:
            return lost
        late = self._late(number) if number else []
        if waited_s < 0.9 * self.roster.timeout_s and not late:
            return TransportError(f"{what} in {self.roster} failed: {error}. Destroy the group and create another one.")
        whom = f": {', '.join(map(repr, late))} did not enter it" if late else ""
        return TransportTimeout(
            f"{what} in {self.roster} did not complete within {self.roster.timeout_s:g} s{whom}. Is a member "
            "suspended, or busy with something else? If it is slow, raise the group's timeout."
        )

    def leave(self) -> None:
        """Records that this process left; the last member removes the group's keys from the store."""
        if self._store.add(f"{self.roster.name}/left", 1) == len(self.roster.ranks):
            self._store.forget(f"{self.roster.name}/")

    def _late(self, number: int) -> list[str]:
        """Records that this process failed in operation `number`; returns the members that did not record as much.

        A member that failed in the same or a later operation had entered it.
        """
        key = f"{self.roster.name}/failed"
        late = {rank: name for rank, name in zip(self.roster.ranks, self.roster.members, strict=True)}
        deadline = time.monotonic() + REPORT_S
        try:
            self._store.set(f"{key}/{self.roster.rank}", str(number))
            while late and time.monotonic() < deadline:
                for rank in list(late):
                    if self._store.check([f"{key}/{rank}"]) and int(self._store.get(f"{key}/{rank}")) >= number:
                        del late[rank]
                time.sleep(PAUSE_S)
        except EchelonError:  # the host does not reply
            return []
        return list(late.values())


class Operation:
    """A started operation; call `wait` in the thread that started it."""

    def __init__(
        self, health: GroupHealth, what: str, launch: Callable[[], Any], *, number: int = 0, peer: int | None = None
    ) -> None:
        """Starts the operation.

        `number` counts the operations of all members (0: not one of them); `peer` is the rank that it sends to or
        receives from.
        """
        self._health = health
        self._what = what
        self._number = number
        self._peer = peer
        self._started = time.monotonic()
        self._ended = False
        if health.broken is not None:
            raise type(health.broken)(f"{health.roster} is broken, so {what} cannot start: {health.broken}")
        try:
            self._work = launch()
        except RuntimeError as error:
            if any(text in str(error) for text in MISUSE):
                raise
            raise self._failed(error) from error

    def is_completed(self) -> bool:
        """Whether `wait` would return immediately, as far as torch knows; for send and receive, only after `wait`."""
        return self._ended or bool(self._work.is_completed())

    def wait(self) -> int | None:
        """Waits until the operation completes; returns the peer's rank of a send or receive, else None."""
        if not self._ended:
            try:
                self._wait()
            except RuntimeError as error:
                raise self._failed(error) from error
            self._ended = True
        if self._peer == ANY_SOURCE:
            return self._health.roster.ranks[int(self._work._source_rank())]
        return self._peer

    def _wait(self) -> None:
        if self._peer == ANY_SOURCE:
            self._wait_for_any_source()
        elif self._peer is not None or self._health.roster.backend == "nccl":
            self._work.wait()  # gloo: if the peer dies, the connection breaks; nccl: only the GPU's stream waits
        else:
            self._wait_for_all()

    def _wait_for_all(self) -> None:
        """Waits in steps and checks for lost members: gloo reports only deaths of directly connected members.

        A member that has completed the operation may leave at once, so its data gets ARRIVE_S to arrive here.
        """
        lost_at = math.inf
        while True:
            try:
                self._work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError:
                if self._work.is_completed():  # it failed, or completed just after the step timed out
                    self._work.wait()
                    return
            if time.monotonic() - lost_at > ARRIVE_S:
                self._look()
            elif lost_at == math.inf and self._health.lost(self._what):
                lost_at = time.monotonic()

    def _wait_for_any_source(self) -> None:
        """Waits in a thread: gloo keeps waiting for the others if a member dies, and has no shorter timeout here."""
        over = threading.Event()
        failures: list[RuntimeError] = []

        def wait() -> None:
            try:
                self._work.wait()
            except RuntimeError as error:
                failures.append(error)
            over.set()

        threading.Thread(target=wait, name="recv-from-any-source", daemon=True).start()
        while not over.wait(LOOK_S):
            self._look()
        if failures:
            raise failures[0]

    def _look(self) -> None:
        if lost := self._health.lost(self._what):
            self._health.broken = lost
            raise lost

    def _failed(self, error: RuntimeError) -> EchelonError:
        waited_s = time.monotonic() - self._started
        self._health.broken = self._health.verdict(self._what, error, self._number, waited_s)
        return self._health.broken
