"""The directory of the members of a world: the host maintains it, every member has a copy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from echelon.errors import Refused

REMEMBERED = 256  # names that left, and incarnations that were retired: the oldest are evicted
REASON_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Member:
    """One incarnation of a named process: after a restart, the name is the same and the incarnation is new."""

    name: str
    address: str
    pid: int
    incarnation: str
    info: tuple[Any, ...] = ()  # the member's `MemberInfo` on the wire; the directory does not read it


@dataclass(slots=True)
class Directory:
    """Maps names to members; `version` counts its changes, so that of two copies the newer one is known.

    A process that joins receives the whole directory, and then only the changes. A member whose copy missed a change
    requests the whole directory again.
    """

    version: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)  # name -> why it left, until the name joins again
    retired: dict[str, str] = field(default_factory=dict)  # incarnation -> why its messages are refused
    changes: list[str] = field(default_factory=list)  # host: the name of each change that was not yet sent

    def add(self, member: Member) -> Member | None:
        """Adds `member`; returns the member of the same name that it replaces."""
        old = self.members.get(member.name)
        if old is not None:
            self._retire(old, f"{member.name!r} joined again as process {member.pid}")
        self.members[member.name] = member
        self.gone.pop(member.name, None)
        self._note(member.name)
        return old

    def remove(self, name: str, reason: str) -> Member | None:
        """Removes `name`; returns the member that had it."""
        old = self.members.pop(name, None)
        if old is not None:
            reason = reason[:REASON_CHARACTERS]
            self._retire(old, reason)
            self.gone[name] = reason
            _shorten(self.gone)
            self._note(name)
        return old

    def _note(self, name: str) -> None:
        self.version += 1
        self.changes.append(name)

    def adopt(self, newer: Directory) -> list[Member]:
        """Replaces the contents by those of `newer` if its version is higher; returns the members that left."""
        if newer.version <= self.version:
            return []
        left = [old for old in self.members.values() if newer.members.get(old.name) != old]
        for old in left:
            self._retire(old, newer.gone.get(old.name, f"{old.name!r} joined again"))
        self.version, self.members, self.gone = newer.version, newer.members, newer.gone
        return left

    def take_changes(self) -> tuple[int, Directory]:
        """Returns the changes since the last call, and the version before them."""
        names = set(self.changes)
        version, self.changes = self.version - len(self.changes), []
        members = {name: self.members[name] for name in names if name in self.members}
        return version, Directory(self.version, members, {name: self.gone[name] for name in names if name in self.gone})

    def update(self, version: int, changed: Directory) -> list[Member] | None:
        """Applies the changes after `version`; returns the members that left, None if an earlier change is missing."""
        if version > self.version:
            return None
        if changed.version <= self.version:
            return []
        left = []
        for name, member in changed.members.items():
            old, self.members[name] = self.members.get(name), member
            self.gone.pop(name, None)
            if old is not None and old != member:
                self._retire(old, f"{name!r} joined again")
                left.append(old)
        for name, why in changed.gone.items():
            self.gone[name] = why
            if (old := self.members.pop(name, None)) is not None:
                self._retire(old, why)
                left.append(old)
        _shorten(self.gone)
        self.version = changed.version
        return left

    def holds(self, member: Member) -> bool:
        return self.members.get(member.name) == member

    def why_gone(self, member: Member) -> str:
        return self.retired.get(member.incarnation) or self.gone.get(member.name) or "it left"

    def to_wire(self) -> tuple[Any, ...]:
        members = [(m.name, m.address, m.pid, m.incarnation, m.info) for m in self.members.values()]
        return (self.version, members, self.gone)

    @classmethod
    def from_wire(cls, value: object) -> Directory:
        """Returns the directory that another process sent; raises Refused on anything else."""
        match value:
            case (int(version), list(entries), dict(gone)):
                members = [member_from_wire(entry) for entry in entries]
                return cls(version, {member.name: member for member in members}, gone)
        raise Refused(f"a directory was refused: {str(value)[:80]} is not one.")

    def _retire(self, member: Member, reason: str) -> None:
        self.retired[member.incarnation] = reason
        _shorten(self.retired)


def member_from_wire(value: object) -> Member:
    """Returns the member that another process described; raises Refused on anything else."""
    match value:
        case (str(name), str(address), int(pid), str(incarnation), tuple(info)):
            return Member(name, address, pid, incarnation, info)
    raise Refused(f"a member was refused: {str(value)[:80]} does not describe one.")


def _shorten(memory: dict[str, str]) -> None:
    while len(memory) > REMEMBERED:
        del memory[next(iter(memory))]
