"""What the host of a world keeps besides the directory: ranks, groups, and whether the world has ended.

It belongs to the thread that runs the host's node, and its functions are served by that node; none of them blocks.
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

Answer = tuple[Any, ...]  # opens with a word: "ok", "lost" (who, why), "differs", "taken", "absent"
OK: Answer = ("ok",)
MET = 4096  # arrivals at barriers that a group remembers, for those who gave up just when they met
BEGUN = "it has begun"  # in the refusal of a rank that comes when all ranks are there


class Registry:
    """The host's tables, served to every member; `children` are those whose end somebody else tells of."""

    def __init__(self, node: Node, size: int, children: frozenset[str] = frozenset()) -> None:
        self._node, self._size, self._children = node, size, children
        self.watch = MemberWatch(self.forget, node.drain)
        self.ended = ""  # why the world has ended
        self._by_rank: dict[int, str] = {}
        self._complete = False
        self._ready: dict[str, Deferred] = {}
        self._groups: dict[str, GroupRecord] = {}
        self._queued: dict[str, dict[str, Callable[[], None]]] = {}  # group -> who is to enter when its name is free
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
        self._serve("barrier", lambda group, *words: self._group(group).come(*words))
        self._serve("withdraw", lambda group, *words: self._group(group).withdraw(*words))
        self._serve("bind", lambda group, *words: self._group(group).bind(*words))
        self._serve("unbind", lambda group, *words: self._group(group).unbind(*words))
        self._serve("find", lambda group, *words: self._group(group).find(*words))

    def _serve(self, name: str, function: Callable[..., Any]) -> None:
        """Serves `function` until the end of the world: after it nobody is answered, but told of the end.

        Answers and that word travel by two connections: an answer could come first, and blame the wrong thing.
        """
        self._node.serve(name, lambda *args: Deferred() if self.ended else function(*args))

    def _admit(self, member: Member) -> str:
        """Why `member` may not join, or ""."""
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
        if info.size and member.name not in self._children:  # those without a size only bring something
            self.watch.add(member, info)
        return ""

    def _why_no_rank(self, member: Member, info: MemberInfo) -> str:
        if info.rank < 0:
            return ""
        if self._complete:
            return f"the world at {self._node.address} is complete: {self._size} came, and {BEGUN}."
        if info.size != self._size or not 0 <= info.rank < self._size:
            return (
                f"{member.name!r} came as rank {info.rank} of {info.size} to the world at {self._node.address}, which "
                f"has {self._size} ranks."
            )
        if holder := self._by_rank.get(info.rank):
            return f"{member.name!r} came as rank {info.rank}, which {holder!r} has."
        return ""

    def _on_ready(self, name: str) -> Deferred | Answer:
        """`name` has joined and serves; answered when all ranks are there: with their names, in order."""
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
        """`member` is dead."""
        if self._node.member(member.name) == member:
            self._node.forget(member.name, why)

    def on_lost(self, member: Member, why: str) -> None:
        """`member` left the directory: nobody waits for it any longer."""
        self.watch.remove(member)
        if not self._complete:
            self._by_rank = {rank: name for rank, name in self._by_rank.items() if name != member.name}
            self._ready.pop(member.name, None)
        for queue in self._queued.values():
            queue.pop(member.name, None)
        if self.ended:
            return  # they are told of that
        for group in list(self._groups.values()):
            if member.name in group.members:
                group.leave(member.name, why)
                self._dissolve(group)

    def _depart(self, name: str, why: str) -> None:
        """`name` leaves, and says why."""
        if member := self._node.member(name):
            self.forget(member, why)

    def end(self, why: str) -> None:
        """Ends the world: everyone's blocking calls raise WorldStopped."""
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
        """`member` waits for the others no longer; says for whom it did, nobody if all have come just now."""
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
    """The members of a group meet when all have entered, and again at every barrier.

    A barrier is as many arrivals as there are members, one of each: the n-th arrival of a member, from whichever of its
    threads, meets the n-th of every other. One that gave up waiting has not arrived.
    """

    def __init__(self, name: str, members: list[str]) -> None:
        self.name, self.members = name, members
        self.entered: dict[str, Deferred] = {}
        self.left: dict[str, str] = {}  # name -> why
        self._owners: dict[tuple[str, str], str] = {}  # kind and key -> who has it
        self._arrivals: dict[str, deque[tuple[int, Deferred]]] = {member: deque() for member in members}
        self._met: deque[tuple[str, int]] = deque(maxlen=MET)  # arrivals that met all others

    @property
    def is_over(self) -> bool:
        """Whether all that entered have left: the name is free again."""
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
        """`member` waits for the others no longer; says who has not come."""
        missing = self.missing
        if missing:
            self.entered.pop(member, None)
        return missing

    def leave(self, member: str, why: str) -> None:
        """`member` is gone, for the reason `why`: nobody shall wait for it."""
        self.left.setdefault(member, why)
        for waiting in self.entered.values() if self.missing else ():
            self._settle_lost(waiting)
        for arrivals in self._arrivals.values():
            while arrivals:
                self._settle_lost(arrivals.popleft()[1])

    def _settle_lost(self, answer: Deferred) -> None:
        lost, why = next(iter(self.left.items()))
        answer.settle(("lost", lost, why))

    def come(self, member: str, number: int) -> Deferred:
        """`member` is at the barrier; `number` tells this arrival from its others."""
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
        """That arrival waits no longer; says how it had ended, or who has not come."""
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
