"""An operation of a collective group under way, and who is to blame when it does not end well."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from echelon.errors import EchelonError, PeerLost, TransportError, TransportTimeout
from echelon.world.store import WorldStore

ANYBODY = -1  # as the peer of an operation: the first that sends
LOOK_S = 0.1  # how often a wait looks whether everybody is alive
VERDICT_S = 2.0  # after a connection broke: how long the world may take to say who was lost
REPORT_S = 1.0  # after a timeout: how long the others may take to say that they wait, too
PAUSE_S = 0.02
MISUSE = ("ProcessGroup", "No backend type")  # how torch says that what was asked for makes no sense


@dataclass(frozen=True, slots=True)
class CollectiveMembers:
    """Who is in a collective group, and which of them this process is."""

    name: str
    ranks: tuple[int, ...]  # world ranks, in the order of the process group
    members: tuple[str, ...]  # their names
    rank: int  # the world rank of this process
    timeout_s: float
    backend: str = "gloo"

    def __str__(self) -> str:
        return f"the collective group of {', '.join(self.members)}"

    def inner(self, rank: int) -> int:
        """The rank inside the process group of the world rank `rank`."""
        if rank not in self.ranks:
            ranks = ", ".join(map(str, self.ranks))
            raise RuntimeError(f"rank {rank} is not in {self}, which has the world ranks {ranks}.")
        return self.ranks.index(rank)


class Circle:
    """Knows from the world which members of a group are gone, and from the group's store who waits for whom."""

    def __init__(self, seat: CollectiveMembers, store: WorldStore, why_lost: Callable[[str], str]) -> None:
        """`why_lost(name)` says why a member is gone, "" while it is there; it raises WorldStopped at the end."""
        self.seat = seat
        self.broken: EchelonError | None = None  # what ended the group; nothing works on it any more
        self._store = store
        self._why_lost = why_lost

    def lost(self, what: str) -> PeerLost | None:
        """The error of the operation `what` if a member is gone."""
        for member in self.seat.members:
            if why := self._why_lost(member):
                return PeerLost(f"{what} in {self.seat} cannot end: {member!r} is gone: {why}.")
        return None

    def verdict(self, what: str, error: Exception, number: int, waited_s: float) -> EchelonError:
        """Why `what` failed, where all that is known is torch's `error`: who died, or who has not come."""
        deadline = time.monotonic() + (0.0 if waited_s >= self.seat.timeout_s else VERDICT_S)
        while (lost := self.lost(what)) is None and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        if lost is not None:
            return lost
        late = self._late(number) if number else []
        if waited_s < 0.9 * self.seat.timeout_s and not late:
            return TransportError(f"{what} in {self.seat} failed: {error}. Destroy the group and make another one.")
        whom = f": {', '.join(map(repr, late))} did not enter it" if late else ""
        return TransportTimeout(
            f"{what} in {self.seat} did not end within {self.seat.timeout_s:g} s{whom}. Is somebody stopped, or busy "
            "with something else? If it is slow, raise the group's timeout."
        )

    def leave(self) -> None:
        """Says that this process left; the last one takes the group's keys out of the store."""
        if self._store.add(f"{self.seat.name}/left", 1) == len(self.seat.ranks):
            self._store.forget(f"{self.seat.name}/")

    def _late(self, number: int) -> list[str]:
        """Who has not said, as this process does now, that it failed in the group's operation `number` or later."""
        key = f"{self.seat.name}/failed"
        late = {rank: name for rank, name in zip(self.seat.ranks, self.seat.members, strict=True)}
        deadline = time.monotonic() + REPORT_S
        try:
            self._store.set(f"{key}/{self.seat.rank}", str(number))
            while late and time.monotonic() < deadline:
                for rank in list(late):
                    if self._store.check([f"{key}/{rank}"]) and int(self._store.get(f"{key}/{rank}")) >= number:
                        del late[rank]
                time.sleep(PAUSE_S)
        except EchelonError:  # the host cannot be asked
            return []
        return list(late.values())


class Operation:
    """An operation that was started; `wait` for it in the thread that started it."""

    def __init__(
        self, circle: Circle, what: str, launch: Callable[[], Any], *, number: int = 0, peer: int | None = None
    ) -> None:
        """Starts it. `number` counts operations of all members (0: it is none), `peer` is whom it sends or hears."""
        self._circle = circle
        self._what = what
        self._number = number
        self._peer = peer
        self._started = time.monotonic()
        self._ended = False
        if circle.broken is not None:
            raise type(circle.broken)(f"{circle.seat} is broken and takes no {what} any more: {circle.broken}")
        try:
            self._work = launch()
        except RuntimeError as error:
            if any(words in str(error) for words in MISUSE):
                raise
            raise self._failed(error) from error

    def is_completed(self) -> bool:
        """Whether `wait` would return at once, as far as torch knows: of a send or receive only after it."""
        return self._ended or bool(self._work.is_completed())

    def wait(self) -> int | None:
        """Returns when it is done: the rank that sent or was sent to, None if it was not between two."""
        if not self._ended:
            try:
                self._wait()
            except RuntimeError as error:
                raise self._failed(error) from error
            self._ended = True
        if self._peer == ANYBODY:
            return self._circle.seat.ranks[int(self._work._source_rank())]
        return self._peer

    def _wait(self) -> None:
        if self._peer == ANYBODY:
            self._wait_for_anybody()
        elif self._peer is not None or self._circle.seat.backend == "nccl":
            self._work.wait()  # gloo: if the peer dies, the connection breaks; nccl: only the GPU's stream waits
        else:
            self._wait_for_everybody()

    def _wait_for_everybody(self) -> None:
        """A member that is connected to a dead one only through others hears nothing from gloo, so we look."""
        while True:
            try:
                self._work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError:
                if self._work.is_completed():  # it failed, or ended well just after our look timed out
                    self._work.wait()
                    return
            self._look()

    def _wait_for_anybody(self) -> None:
        """gloo goes on waiting for the others if one dies, and its wait cannot be cut into pieces: a thread has it."""
        over = threading.Event()
        failures: list[RuntimeError] = []

        def wait() -> None:
            try:
                self._work.wait()
            except RuntimeError as error:
                failures.append(error)
            over.set()

        threading.Thread(target=wait, name="recv-from-anybody", daemon=True).start()
        while not over.wait(LOOK_S):
            self._look()
        if failures:
            raise failures[0]

    def _look(self) -> None:
        if lost := self._circle.lost(self._what):
            self._circle.broken = lost
            raise lost

    def _failed(self, error: RuntimeError) -> EchelonError:
        waited_s = time.monotonic() - self._started
        self._circle.broken = self._circle.verdict(self._what, error, self._number, waited_s)
        return self._circle.broken
