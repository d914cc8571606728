"""Who is on this host, and who has died: proofs, process descriptors, heartbeats.

Two processes are on one host if one can open what the other wrote down in its private folder of shared memory; names of
hosts prove nothing. If they also share process numbers, a descriptor of the process tells its end at once. Whoever
cannot be watched so must be heard of: it beats every `BEAT_S` and is taken for dead after `SILENCE_S` without.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import Refused
from echelon.transport.session import pid_namespace, start_ticks
from echelon.world.directory import Member

NONCE = "nonce"
BEAT_S, SILENCE_S = 2.0, 10.0


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """What a member says of itself; `rank` is -1 of one that came later, `size` 0 of the host of a launch."""

    rank: int
    size: int
    folder: str  # its private folder
    nonce: str  # what lies in it
    namespace: str  # where its process number counts
    network: str  # where its loopback is
    ticks: int  # when its process started

    def to_wire(self) -> tuple[Any, ...]:
        return (self.rank, self.size, self.folder, self.nonce, self.namespace, self.network, self.ticks)

    @classmethod
    def from_wire(cls, value: tuple[Any, ...]) -> MemberInfo:
        """The info of a member; raises Refused on anything else."""
        match value:
            case (int(rank), int(size), str(folder), str(nonce), str(namespace), str(network), int(ticks)):
                return cls(rank, size, folder, nonce, namespace, network, ticks)
        raise Refused(f"a member was refused: it describes itself as {str(value)[:80]}.")

    @classmethod
    def of(cls, member: Member) -> MemberInfo:
        return cls.from_wire(member.info)

    @property
    def is_near(self) -> bool:
        """Whether that process is on this host."""
        with contextlib.suppress(OSError, ValueError):
            descriptor = os.open(Path(self.folder) / NONCE, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:  # the path came from elsewhere: it may name a pipe, which blocks
                is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
                return is_file and file.read(len(self.nonce) + 1) == self.nonce.encode()
        return False

    @property
    def is_beside(self) -> bool:
        """Whether that process is on this host and has the same loopback: containers may share the one alone."""
        return self.is_near and self.network == _network()


def write_info(rank: int, size: int, folder: Path) -> MemberInfo:
    """The info of this process, its nonce written down in `folder`."""
    nonce = secrets.token_hex(16)
    descriptor = os.open(folder / NONCE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w") as file:
        file.write(nonce)
    return MemberInfo(rank, size, str(folder), nonce, pid_namespace() or "", _network(), start_ticks(os.getpid()) or 0)


def _network() -> str:
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


class MemberWatch:
    """Watches members from the thread that polls `descriptors` and calls `look` now and then."""

    def __init__(self, on_death: Callable[[Member, str], None], drain: Callable[[], None] = lambda: None) -> None:
        """`drain` takes in what the dead sent last, before `on_death` is called for them."""
        self._on_death, self._drain = on_death, drain
        self._poller = select.poll()
        self._by_descriptor: dict[int, Member] = {}
        self._heard: dict[Member, float] = {}  # those who must be heard of, and when they were
        self._ended: list[Member] = []  # those who were dead already when they were added
        self._looked_at = time.monotonic()

    @property
    def descriptors(self) -> list[int]:
        return list(self._by_descriptor)

    def add(self, member: Member, info: MemberInfo) -> bool:
        """Begins to watch; False if this member must be heard of."""
        if info.is_near and info.namespace == pid_namespace():
            try:
                descriptor = os.pidfd_open(member.pid)
            except OSError:
                self._ended.append(member)
                return True
            self._by_descriptor[descriptor] = member
            self._poller.register(descriptor, select.POLLIN)
            if start_ticks(member.pid) != info.ticks:  # another process has its number already
                self._drop(descriptor)
                self._ended.append(member)
            return True
        self._heard[member] = time.monotonic()
        return False

    def hear(self, name: str) -> None:
        for member in self._heard:
            if member.name == name:
                self._heard[member] = time.monotonic()

    def remove(self, member: Member) -> None:
        self._heard.pop(member, None)
        for descriptor in [one for one, watched in self._by_descriptor.items() if watched == member]:
            self._drop(descriptor)

    def look(self) -> None:
        """Tells of the deaths since the last look."""
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
            self._on_death(member, f"nothing was heard of it for {SILENCE_S:.0f} s")

    def _forgive(self) -> None:
        """This process was stopped, perhaps with all others: it could hear nobody meanwhile."""
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
