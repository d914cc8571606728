"""The tables of a world's host besides the directory: ranks, groups, and whether the world has ended.

The registry belongs to the thread that polls the host's node. The node serves its functions; none of them blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from echelon.errors import Refused
from echelon.transport.channel import Refusal
from echelon.world.directory import Member
from echelon.world.messages import Deferred
from echelon.world.node import Node
from echelon.world.store_table import StoreTable
from echelon.world.watch import MemberInfo, MemberWatch

Answer = tuple[Any, ...]  # the first item is "ok", "lost" (name, reason), "differs", "taken" or "absent"
OK: Answer = ("ok",)
MET = 4096  # completed barrier arrivals that a group remembers, for members that timed out at the same moment
BEGUN = "it has begun"  # in the refusal of a rank that joins after all ranks have joined


class Registry:
    """The host's tables, served to every member; `children` are the members whose deaths the launcher reports."""

    def __init__(self, node: Node, size: int, children: frozenset[str] = frozenset()) -> None:
        self._node, self._size, self._children = node, size, children
        self.watch = MemberWatch(self.forget, node.drain)
        self.ended = ""  # why the world has ended
        self._by_rank: dict[int, str] = {}
        self._complete = False
        self._ready: dict[str, Deferred] = {}
        self._groups: dict[str, GroupRecord] = {}
        self._queued: dict[
            str, dict[str, Callable[[], None]]
        ] = {}  # group -> member -> enters it once the name is free
        node.admit = self._admit
        node.serve("beat", self.watch.hear)
        node.serve("end", self.end)
        node.serve("depart", self._depart)
        self._serve("ready", self._on_ready)
        self._serve("missing", lambda: [rank for rank in range(size) if rank not in self._by_rank])
        self._serve("store", StoreTable())
        self._serve("create_rpc_group", self._enter_group)
        self._serve("give_up_group", self._give_up_group)
        self._serve("leave_group", self._leave_group)
        self._serve("barrier", lambda group, *args: self._group(group).arrive(*args))
        self._serve("withdraw", lambda group, *args: self._group(group).withdraw(*args))
        self._serve("bind", lambda group, *args: self._group(group).bind(*args))
        self._serve("unbind", lambda group, *args: self._group(group).unbind(*args))
        self._serve("find", lambda group, *args: self._group(group).find(*args))

    def _serve(self, name: str, function: Callable[..., Any]) -> None:
        """Serves `function` until the end of the world; later requests get no reply, only the "ended" message.

        Replies and that message use different connections: a reply could arrive first and report the wrong cause.
        """
        self._node.serve(name, lambda *args: Deferred() if self.ended else function(*args))

    def _admit(self, member: Member) -> str:
        """Returns why `member` may not join, or ""."""
        try:
            info = MemberInfo.of(member)
        except Refused as error:
            return str(error)
        if self.ended:
            return f"the world at {self._node.address} has ended: {self.ended}."
        if self._node.member(member.name) is not None:
            return f"there is a {member.name!r} in the world at {self._node.address} already. Names are unique."
        if why := self._why_no_rank(member, info):
            return why
        if info.size and member.name not in self._children:  # size 0: a node that only delivers a result
            self.watch.add(member, info)
        return ""

    def _why_no_rank(self, member: Member, info: MemberInfo) -> str:
        if info.rank < 0:
            return ""
        if self._complete:
            return f"the world at {self._node.address} is complete: {self._size} ranks joined, and {BEGUN}."
        if info.size != self._size or not 0 <= info.rank < self._size:
            return (
                f"{member.name!r} wants to join as rank {info.rank} of {info.size}, but the world at "
                f"{self._node.address} has {self._size} ranks."
            )
        if holder := self._by_rank.get(info.rank):
            return f"{member.name!r} wants to join as rank {info.rank}, which {holder!r} has."
        return ""

    def _on_ready(self, name: str) -> Deferred | Answer:
        """Records that `name` has joined and serves requests; replies with the names in order when all ranks have."""
        member = self._node.member(name)
        if member is None:
            raise Refusal(f"{name!r} is not in this world.")
        info = MemberInfo.of(member)
        if info.rank < 0:
            return ("ok", self._ranked, self._size)
        self._by_rank[info.rank] = name
        answer = self._ready[name] = Deferred()
        if len(self._by_rank) == self._size:
            self._complete = True
            for waiting in self._ready.values():
                waiting.settle(("ok", self._ranked, self._size))
        return answer

    @property
    def _ranked(self) -> list[str]:
        return [self._by_rank[rank] for rank in sorted(self._by_rank)]

    def forget(self, member: Member, why: str) -> None:
        """Removes the dead `member` from the directory."""
        if self._node.member(member.name) == member:
            self._node.forget(member.name, why)

    def on_lost(self, member: Member, why: str) -> None:
        """Ends all waits for `member`, which was removed from the directory."""
        self.watch.remove(member)
        if not self._complete:
            self._by_rank = {rank: name for rank, name in self._by_rank.items() if name != member.name}
            self._ready.pop(member.name, None)
        for queue in self._queued.values():
            queue.pop(member.name, None)
        if self.ended:
            return  # the "ended" message ends their waits
        for group in list(self._groups.values()):
            if member.name in group.members:
                group.leave(member.name, why)
                self._dissolve(group)

    def _depart(self, name: str, why: str) -> None:
        """Removes `name`, which leaves for the reason `why`."""
        if member := self._node.member(name):
            self.forget(member, why)

    def end(self, why: str) -> None:
        """Ends the world: the blocking calls of all members raise WorldStopped."""
        self.ended = self.ended or why
        for name in self._node.members:
            self._node.post(name, "ended", self.ended)

    # Groups.

    def _group(self, name: str) -> GroupRecord:
        if (group := self._groups.get(name)) is None:
            raise Refusal(f"there is no group {name[:80]!r} in this world.")
        return group

    def _enter_group(self, name: str, member: str, members: list[str]) -> Deferred:
        group = self._groups.setdefault(name, GroupRecord(name, members))
        if member in group.left or (member in group.entered and not group.missing):  # a former group of that name
            answer = Deferred()
            queue = self._queued.setdefault(name, {})
            queue[member] = lambda: self._enter_into(answer, name, member, members)
            return answer
        if group.members != members:
            answer = Deferred()
            answer.settle(("differs", group.members))
            return answer
        return group.enter(member, self._node.why_gone)

    def _enter_into(self, answer: Deferred, name: str, member: str, members: list[str]) -> None:
        self._enter_group(name, member, members).attach(answer.settle)

    def _leave_group(self, name: str, member: str) -> Answer:
        group = self._group(name)
        group.leave(member, "it left the group")
        self._dissolve(group)
        return OK

    def _give_up_group(self, name: str, member: str) -> list[str]:
        """Ends the wait of `member` for the group; returns the missing members, none if the last has just entered."""
        group = self._group(name)
        if self._queued.get(name, {}).pop(member, None):
            return [other for other in group.entered if other not in group.left]
        missing = group.give_up(member)
        self._dissolve(group)
        return missing

    def _dissolve(self, group: GroupRecord) -> None:
        if group.is_over and self._groups.get(group.name) is group:
            del self._groups[group.name]
            for enter in self._queued.pop(group.name, {}).values():
                enter()


class GroupRecord:
    """The host's record of a group: its members wait for each other on entering, and at every barrier.

    A barrier needs one arrival of each member: the n-th arrival of a member, from any of its threads, matches the n-th
    of every other. An arrival that timed out does not count.
    """

    def __init__(self, name: str, members: list[str]) -> None:
        self.name, self.members = name, members
        self.entered: dict[str, Deferred] = {}
        self.left: dict[str, str] = {}  # name -> why
        self._owners: dict[tuple[str, str], str] = {}  # kind and key -> owner
        self._arrivals: dict[str, deque[tuple[int, Deferred]]] = {member: deque() for member in members}
        self._met: deque[tuple[str, int]] = deque(maxlen=MET)  # arrivals whose barrier is complete

    @property
    def is_over(self) -> bool:
        """Whether all members that entered have left, so that the name is free again."""
        return all(member in self.left for member in self.entered)

    @property
    def missing(self) -> list[str]:
        return [member for member in self.members if member not in self.entered]

    def enter(self, member: str, why_gone: Callable[[str], str]) -> Deferred:
        answer = self.entered[member] = Deferred()
        for other in self.missing:
            if why := why_gone(other):
                self.leave(other, why)
        if not self.missing and not self.left:
            for waiting in self.entered.values():
                waiting.settle(OK)
        elif self.left:
            self._settle_lost(answer)
        return answer

    def give_up(self, member: str) -> list[str]:
        """Ends the wait of `member` for the group; returns the members that have not entered."""
        missing = self.missing
        if missing:
            self.entered.pop(member, None)
        return missing

    def leave(self, member: str, why: str) -> None:
        """Ends all waits for `member`, which left for the reason `why`."""
        self.left.setdefault(member, why)
        for waiting in self.entered.values() if self.missing else ():
            self._settle_lost(waiting)
        for arrivals in self._arrivals.values():
            while arrivals:
                self._settle_lost(arrivals.popleft()[1])

    def _settle_lost(self, answer: Deferred) -> None:
        lost, why = next(iter(self.left.items()))
        answer.settle(("lost", lost, why))

    def arrive(self, member: str, number: int) -> Deferred:
        """Records that `member` is at the barrier; `number` distinguishes its arrivals."""
        answer = Deferred()
        if self.left:
            self._settle_lost(answer)
            return answer
        self._arrivals[member].append((number, answer))
        if all(self._arrivals.values()):
            for other, arrivals in self._arrivals.items():
                number, met = arrivals.popleft()
                self._met.append((other, number))
                met.settle(OK)
        return answer

    def withdraw(self, member: str, number: int) -> Answer:
        """Withdraws an arrival that timed out; returns its outcome if it has one, else the absent members."""
        if (member, number) in self._met:
            return OK
        if self.left:
            return ("lost", *next(iter(self.left.items())))
        absent = [other for other, arrivals in self._arrivals.items() if not arrivals]
        self._arrivals[member] = deque(one for one in self._arrivals[member] if one[0] != number)
        return ("absent", absent)

    def bind(self, kind: str, key: str, owner: str) -> Answer:
        holder = self._owners.get((kind, key))
        if holder is not None and holder not in self.left:
            return ("taken", holder)
        self._owners[kind, key] = owner
        return OK

    def unbind(self, kind: str, key: str, owner: str) -> Answer:
        holder = self._owners.get((kind, key))
        if holder != owner:
            return ("absent",) if holder is None else ("taken", holder)
        del self._owners[kind, key]
        return OK

    def find(self, kind: str, key: str) -> Answer:
        holder = self._owners.get((kind, key))
        if holder is None:
            return ("absent",)
        return ("lost", holder, self.left[holder]) if holder in self.left else ("ok", holder)
