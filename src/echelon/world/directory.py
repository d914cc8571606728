"""Who is in the world: the directory that the host keeps and every member has a copy of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from echelon.errors import Refused

REMEMBERED = 256  # names that left, and incarnations that were retired: the oldest are forgotten
REASON_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Member:
    """One life of a named process: a restarted one has the same name and another incarnation."""

    name: str
    address: str
    pid: int
    incarnation: str
    card: tuple[Any, ...] = ()  # what it says of itself to everyone; the directory only carries it


@dataclass(frozen=True, slots=True)
class Progress:
    """What the host knows of a member's work; times are the host's monotonic clock."""

    counter: int
    changed_at: float  # when the counter last changed
    pid: int
    joined_at: float


@dataclass(slots=True)
class Directory:
    """Names and the members behind them; `epoch` counts its changes, so a copy knows which of two is newer.

    It always travels whole: a copy that missed some changes is right again with the next one it gets.
    """

    epoch: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)  # name -> why it left, until the name joins again
    retired: dict[str, str] = field(default_factory=dict)  # incarnation -> why nothing of it counts any more

    def add(self, member: Member) -> Member | None:
        """Enters `member`; returns the one of that name whose place it took."""
        old = self.members.get(member.name)
        if old is not None:
            self._retire(old, f"{member.name!r} joined again as process {member.pid}")
        self.members[member.name] = member
        self.gone.pop(member.name, None)
        self.epoch += 1
        return old

    def remove(self, name: str, reason: str) -> Member | None:
        """Strikes out `name`; returns who that was."""
        old = self.members.pop(name, None)
        if old is not None:
            reason = reason[:REASON_CHARACTERS]
            self._retire(old, reason)
            self.gone[name] = reason
            _shorten(self.gone)
            self.epoch += 1
        return old

    def adopt(self, newer: Directory) -> list[Member]:
        """Becomes `newer`, unless it is not; returns the members that are no longer there."""
        if newer.epoch <= self.epoch:
            return []
        left = [old for old in self.members.values() if newer.members.get(old.name) != old]
        for old in left:
            self._retire(old, newer.gone.get(old.name, f"{old.name!r} joined again"))
        self.epoch, self.members, self.gone = newer.epoch, newer.members, newer.gone
        return left

    def holds(self, member: Member) -> bool:
        return self.members.get(member.name) == member

    def why_gone(self, member: Member) -> str:
        return self.retired.get(member.incarnation) or self.gone.get(member.name) or "it left"

    def to_wire(self) -> tuple[Any, ...]:
        members = [(m.name, m.address, m.pid, m.incarnation, m.card) for m in self.members.values()]
        return (self.epoch, members, self.gone)

    @classmethod
    def from_wire(cls, value: object) -> Directory:
        """The directory another process sent; raises Refused on anything else."""
        match value:
            case (int(epoch), list(entries), dict(gone)):
                members = [member_from_wire(entry) for entry in entries]
                return cls(epoch, {member.name: member for member in members}, gone)
        raise Refused(f"a directory was refused: it is {str(value)[:80]}.")

    def _retire(self, member: Member, reason: str) -> None:
        self.retired[member.incarnation] = reason
        _shorten(self.retired)


def member_from_wire(value: object) -> Member:
    """The member another process described; raises Refused on anything else."""
    match value:
        case (str(name), str(address), int(pid), str(incarnation), tuple(card)):
            return Member(name, address, pid, incarnation, card)
    raise Refused(f"a member was refused: it is described as {str(value)[:80]}.")


def _shorten(memory: dict[str, str]) -> None:
    while len(memory) > REMEMBERED:
        del memory[next(iter(memory))]
