"""Calls to the members of a distributed buffer in parallel: this process's directly, the others by their services."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from echelon.errors import PeerLost
from echelon.replay.sampled import Mass
from echelon.servers.buffer_member import Answer

if TYPE_CHECKING:
    from echelon.transport.channel_calls import Future
    from echelon.world import RpcGroup

logger = logging.getLogger("echelon.servers")


class BufferPeers:
    """Calls the members, and records their masses.

    `services` are those of this process, which the other members call. A member that dies is dropped: `lost` has the
    reason, and a message is logged. A reply that `post` does not wait for is awaited before the next call to that
    member. If the host of the world dies, no member can be reached, and none of them is known to be dead: every call
    then raises PeerLost, or WorldStopped if the world has ended.
    """

    def __init__(self, name: str, group: RpcGroup, services: Mapping[str, Callable[..., Answer]]) -> None:
        self.name, self.group, self.services = name, group, dict(services)
        self.own = group.get_cur_name()
        self.lost: dict[str, str] = {}
        self.masses = {member: Mass() for member in group.get_group_members()}
        self.passed_over = 0  # priorities that arrived too late, by the members' replies so far
        self._under_way: dict[str, Future] = {}  # replies that were not awaited yet
        for service, function in self.services.items():
            group.register(self._key(self.own, service), function)

    def _key(self, member: str, service: str) -> str:
        return f"{self.name}/{member}/{service}"

    @property
    def members(self) -> list[str]:
        """The members that are not known to be dead, in the same order everywhere."""
        return list(self.masses)

    @property
    def mass(self) -> Mass:
        """The mass of all members, by their last replies."""
        return sum(self.masses.values(), Mass())

    def ask(self, service: str, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Answer]:
        """Calls a service of several members in parallel; the result has no entry for members that are lost."""
        self._check(f"{service}()")
        self.settle(arguments)
        futures = {
            member: self._begin(service, member, given) for member, given in arguments.items() if member != self.own
        }
        answers = {}
        if self.own in arguments:
            answers[self.own] = self.note(self.own, self.services[service](*arguments[self.own]))
        for member, future in futures.items():
            if (answer := self._wait(member, future)) is not None:
                answers[member] = answer
        return {member: answers[member] for member in arguments if member in answers}

    def post(self, service: str, member: str, arguments: tuple[Any, ...]) -> None:
        """Calls a service of one member without waiting; a member serves its calls in order."""
        self._check(f"{service}()")
        if member == self.own:
            self.note(member, self.services[service](*arguments))
            return
        self.settle([member])
        if (future := self._begin(service, member, arguments)) is not None:
            self._under_way[member] = future

    def _begin(self, service: str, member: str, arguments: tuple[Any, ...]) -> Future | None:
        """Starts a call; returns None for a member that is lost."""
        if member not in self.masses:
            return None
        try:
            return self.group.registered_async(self._key(member, service), args=arguments)
        except PeerLost as error:
            self._leave_out(member, error)
            return None

    def request_masses(self, members: Collection[str]) -> None:
        """Requests the masses of `members` without waiting; `collect` processes the replies."""
        self.collect(members)
        for member in members:
            if member not in self._under_way:
                self.post("look", member, ())

    def collect(self, members: Iterable[str]) -> None:
        """Processes the replies of `members` that have arrived."""
        self.settle([m for m in members if (future := self._under_way.get(m)) is not None and future.done()])

    def settle(self, members: Iterable[str]) -> None:
        """Waits for the pending replies of `members`."""
        for member in list(members):
            self._wait(member, self._under_way.pop(member, None))

    def look(self) -> None:
        """Updates the masses of all members."""
        self.ask("look", {member: () for member in self.members})

    def _wait(self, member: str, future: Future | None) -> Answer | None:
        if future is None:
            return None
        try:
            answer: Answer = future.wait()
        except PeerLost as error:
            self._leave_out(member, error)
            return None
        return self.note(member, answer)

    def note(self, member: str, answer: Answer) -> Answer:
        """Records the mass in a reply of `member`."""
        self.masses[member] = Mass(*answer["mass"])
        self.passed_over += answer.get("passed_over", 0)
        return answer

    def _check(self, what: str) -> None:
        """Raises if the world is over."""
        self.group.check_world(f"{what} of the buffer {self.name!r}")

    def _leave_out(self, member: str, error: PeerLost) -> None:
        self._check(f"a call to {member!r}")  # raises if only the host of the world is gone: the member may be alive
        size = self.masses.pop(member, Mass()).size
        self.lost[member] = (
            f"buffer {self.name}: member {member} is lost with {size} items ({error}). Sampling continues with "
            f"{len(self.masses)} members."
        )
        logger.warning("%s", self.lost[member])
