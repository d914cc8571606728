"""The members of a distributed buffer, asked all at once: the own one directly, the others by their services."""

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
    """What is known of the members, and how they are asked.

    `services` are the own member's, which the others call. A member that dies is left out from then on: `lost` says who
    and why, and a message is logged. Answers that nobody needs at once are awaited by whoever asks that member next.
    Without the host of the world no member can be reached, and none of them is known to be dead: whatever is asked then
    raises PeerLost, or WorldStopped if the world has ended.
    """

    def __init__(self, name: str, group: RpcGroup, services: Mapping[str, Callable[..., Answer]]) -> None:
        self.name, self.group, self.services = name, group, dict(services)
        self.own = group.get_cur_name()
        self.lost: dict[str, str] = {}
        self.masses = {member: Mass() for member in group.get_group_members()}
        self.passed_over = 0  # priorities that came too late, as far as members have told
        self._under_way: dict[str, Future] = {}  # futures of answers that were not awaited
        for service, function in self.services.items():
            group.register(self._key(self.own, service), function)

    def _key(self, member: str, service: str) -> str:
        return f"{self.name}/{member}/{service}"

    @property
    def members(self) -> list[str]:
        """Those that are alive as far as we know, the same order everywhere."""
        return list(self.masses)

    @property
    def mass(self) -> Mass:
        """What all members weigh, by their last answers."""
        return sum(self.masses.values(), Mass())

    def ask(self, service: str, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Answer]:
        """Calls a service of several members at once; those that are lost have no answer."""
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
        """Calls a service of one member and does not wait; its calls are served in order."""
        self._check(f"{service}()")
        if member == self.own:
            self.note(member, self.services[service](*arguments))
            return
        self.settle([member])
        if (future := self._begin(service, member, arguments)) is not None:
            self._under_way[member] = future

    def _begin(self, service: str, member: str, arguments: tuple[Any, ...]) -> Future | None:
        """The answer that will come; None from a member that is lost."""
        if member not in self.masses:
            return None
        try:
            return self.group.registered_async(self._key(member, service), args=arguments)
        except PeerLost as error:
            self._leave_out(member, error)
            return None

    def glance(self, members: Collection[str]) -> None:
        """Asks members what they weigh without waiting; `hear` takes in what they say."""
        self.hear(members)
        for member in members:
            if member not in self._under_way:
                self.post("look", member, ())

    def hear(self, members: Iterable[str]) -> None:
        """Takes in the answers of `members` that have come."""
        self.settle([m for m in members if (future := self._under_way.get(m)) is not None and future.done()])

    def settle(self, members: Iterable[str]) -> None:
        """Awaits what is under way from `members`."""
        for member in list(members):
            self._wait(member, self._under_way.pop(member, None))

    def look(self) -> None:
        """Asks all members what they weigh."""
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
        """Takes over what `member` weighs by its answer."""
        self.masses[member] = Mass(*answer["mass"])
        self.passed_over += answer.get("passed_over", 0)
        return answer

    def _check(self, what: str) -> None:
        """Raises if the world is over."""
        self.group.check_world(f"{what} of the buffer {self.name!r}")

    def _leave_out(self, member: str, error: PeerLost) -> None:
        self._check(f"a call to {member!r}")  # which lives, if only the host of the world is gone
        size = self.masses.pop(member, Mass()).size
        self.lost[member] = (
            f"buffer {self.name}: member {member} is lost with {size} items ({error}). Sampling goes on with "
            f"{len(self.masses)} members."
        )
        logger.warning("%s", self.lost[member])
