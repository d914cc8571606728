"""Detects which members are on this host and which have died, by nonces, pidfds and heartbeats.

Two processes are on one host if one can read the nonce that the other wrote to its private folder in shared memory;
host names prove nothing. Only processes of one user can: those of two users exchange messages as if they were on two
hosts. If they also share a pid namespace, a pidfd reports the end of the process immediately. Any other member sends a
heartbeat every `BEAT_S`, and is declared dead after `SILENCE_S` without one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.disk import is_private, open_own
from echelon.errors import Refused
from echelon.transport.session import pid_namespace, start_ticks
from echelon.world.directory import Member

NONCE = "nonce"
BEAT_S, SILENCE_S = 2.0, 10.0


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """A member's description of itself, sent to all members."""

    rank: int  # -1: joined without a rank
    size: int  # the world size; 0: not a member, such as the host of a launch
    folder: str  # its private folder
    nonce: str  # in a file of that folder
    namespace: str  # its pid namespace
    network: str  # its network namespace, which has its loopback
    ticks: int  # start time of its process

    def to_wire(self) -> tuple[Any, ...]:
        return (self.rank, self.size, self.folder, self.nonce, self.namespace, self.network, self.ticks)

    @classmethod
    def from_wire(cls, value: tuple[Any, ...]) -> MemberInfo:
        """Returns the info that another process sent; raises Refused on anything else."""
        match value:
            case (int(rank), int(size), str(folder), str(nonce), str(namespace), str(network), int(ticks)):
                return cls(rank, size, folder, nonce, namespace, network, ticks)
        raise Refused(f"a member was refused: {str(value)[:80]} does not describe one.")

    @classmethod
    def of(cls, member: Member) -> MemberInfo:
        return cls.from_wire(member.info)

    @property
    def is_near(self) -> bool:
        """Whether that process is on this host and of this user."""
        with contextlib.suppress(OSError, ValueError):
            if is_private(self.folder):  # another process chose the path
                with open(open_own(Path(self.folder) / NONCE, os.O_RDONLY), "rb") as file:
                    return file.read(len(self.nonce) + 1) == self.nonce.encode()
        return False

    @property
    def is_beside(self) -> bool:
        """Whether that process is on this host and has the same loopback: containers may share only the memory."""
        return self.is_near and self.network == _network()


NO_INFO = MemberInfo(-1, 0, "", "", "", "", 0)  # of a node that only serves the launcher or delivers a result to it


def write_info(rank: int, size: int, folder: Path) -> MemberInfo:
    """Writes a nonce to `folder`; returns the info of this process."""
    nonce = secrets.token_hex(16)
    with open(open_own(folder / NONCE, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
        file.write(nonce)
    return MemberInfo(rank, size, str(folder), nonce, pid_namespace() or "", _network(), start_ticks(os.getpid()) or 0)


def _network() -> str:
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


class MemberWatch:
    """Detects the deaths of members; one thread polls `descriptors` and calls `look` regularly."""

    def __init__(self, on_death: Callable[[Member, str], None], drain: Callable[[], None] = lambda: None) -> None:
        """`drain` serves the last messages of dead members, before `on_death` is called for them."""
        self._on_death, self._drain = on_death, drain
        self._poller = select.poll()
        self._by_descriptor: dict[int, Member] = {}
        self._heard: dict[Member, float] = {}  # members that send heartbeats, and the time of the last one
        self._ended: list[Member] = []  # dead members that are not reported yet
        self._looked_at = time.monotonic()

    @property
    def descriptors(self) -> list[int]:
        return list(self._by_descriptor)

    def add(self, member: Member, info: MemberInfo) -> bool:
        """Starts to watch `member`; returns False if it needs heartbeats."""
        if info.is_near and info.namespace == pid_namespace():
            try:
                descriptor = os.pidfd_open(member.pid)
            except OSError:
                self._ended.append(member)
                return True
            self._by_descriptor[descriptor] = member
            self._poller.register(descriptor, select.POLLIN)
            if start_ticks(member.pid) != info.ticks:  # another process has its pid already
                self._drop(descriptor)
                self._ended.append(member)
            return True
        self._heard[member] = time.monotonic()
        return False

    def hear(self, name: str) -> None:
        """Records a heartbeat of `name`."""
        for member in self._heard:
            if member.name == name:
                self._heard[member] = time.monotonic()

    def remove(self, member: Member) -> None:
        self._heard.pop(member, None)
        for descriptor in [one for one, watched in self._by_descriptor.items() if watched == member]:
            self._drop(descriptor)

    def look(self) -> None:
        """Calls `on_death` for the deaths since the last call."""
        for descriptor, _ in self._poller.poll(0) if self._by_descriptor else ():
            if member := self._by_descriptor.get(descriptor):
                self._drop(descriptor)
                self._ended.append(member)
        if self._ended:
            self._drain()
        while self._ended:
            member = self._ended.pop(0)
            self._on_death(member, f"its process {member.pid} has ended")
        self._forgive()
        late = time.monotonic() - SILENCE_S
        for member in [one for one, heard in self._heard.items() if heard < late]:
            del self._heard[member]
            self._on_death(member, f"it sent no heartbeat for {SILENCE_S:.0f} s")

    def _forgive(self) -> None:
        """Time during which this process was suspended, perhaps with all others, does not count as silence."""
        now, before = time.monotonic(), self._looked_at
        self._looked_at = now
        if now - before > BEAT_S:
            self._heard = {member: min(now, heard + now - before) for member, heard in self._heard.items()}

    def close(self) -> None:
        for descriptor in self.descriptors:
            self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)
        del self._by_descriptor[descriptor]
        os.close(descriptor)
