"""The hosts of the actors, and the moves of actors between hosts.

An actor moves when its host is lost, or when a host joins that has fewer actors per core (`balance`). First it is ended
at its old place, unless that is lost. Then its stream is given to the new host (`Ownership`). When the carrier has seen
that, or is dead, no slot of the old place can be stored any longer, and the supervisor is told the exit; it starts the
actor again, at the new place.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from echelon.engines.process import Exit
from echelon.hosts.members import Host, actors_text
from echelon.hosts.ownership import HERE, Ownership

Divide = Callable[[Sequence[Host | None], Mapping[Host, int]], list[Host | None]]
End = Callable[[Host, str], bool]  # ends an actor on a host; returns False if it is not running there


def name_of(actor: int) -> str:
    return f"actor-{actor}"


def actor_of(name: str) -> int:
    return int(name.removeprefix("actor-"))


class Places:
    """Which host runs each actor."""

    def __init__(self, num_actors: int, ownership: Ownership, end: End, divide: Divide) -> None:
        """`divide` returns the host of each actor; those without one wait."""
        self._ownership, self._end, self._divide = ownership, end, divide
        self._tokens = [HERE] * num_actors  # of `Ownership`
        self._at: list[Host | None] = [None] * num_actors
        self._to: list[Host | None] = [None] * num_actors
        self._leaving: set[int] = set()  # actors that are being ended to be moved
        self._given: set[int] = set()  # actors with a new place that the carrier may not have seen yet
        self._exits: dict[int, Exit] = {}  # of those that ran before they were given
        self._indices = {name_of(actor): actor for actor in range(num_actors)}

    def of(self, name: str) -> Host | None:
        """Returns the host of a role, if it is an actor that has one."""
        actor = self._indices.get(name)
        return None if actor is None else self._at[actor]

    def token(self, actor: int) -> int:
        """Returns the token with which the host of an actor proves that it owns the stream."""
        return self._tokens[actor]

    def may_start(self, name: str) -> bool:
        """Returns whether a role may be started now; an actor between two hosts, or without one, must wait."""
        actor = self._indices.get(name)
        if actor is None:
            return True
        return self._at[actor] is not None and actor not in self._leaving and actor not in self._given

    def divide(self, hosts: Sequence[Host]) -> str:
        """Divides the actors among `hosts` and moves those whose host changes; returns the changes as text."""
        wanted = self._divide(self._to, {host: host.cores for host in hosts})
        changed = [actor for actor, host in enumerate(wanted) if host is not self._to[actor]]
        text = self._describe(changed, wanted)
        self._to = wanted
        for host in hosts:
            host.actors = []
        for actor, place in enumerate(wanted):
            if place is not None:
                place.actors.append(actor)
        for actor in changed:
            place, name = self._at[actor], name_of(actor)
            if actor not in self._leaving and place is not None and not place.lost and self._end(place, name):
                self._leaving.add(actor)
        for actor, place in enumerate(self._at):
            if place is not None and place.lost:
                self._take_from_lost(actor, place)
            elif actor not in self._leaving and place is not wanted[actor]:
                self._give(actor)
        return text

    def _describe(self, changed: Sequence[int], wanted: Sequence[Host | None]) -> str:
        """Returns the changes as text: "a takes actors 2 and 3 from b and actor 7, actor 8 waits for a host"."""

        def route(actor: int) -> tuple[str, str]:
            to, source = wanted[actor], self._to[actor]
            return to.label if to is not None else "", source.label if source is not None and not source.lost else ""

        idle = [actor for actor in changed if wanted[actor] is None]
        changed = [actor for actor in changed if wanted[actor] is not None]
        texts: dict[str, list[str]] = {}
        for (to, source), actors in groupby(sorted(changed, key=lambda actor: (*route(actor), actor)), route):
            texts.setdefault(to, []).append(actors_text(list(actors)) + (f" from {source}" if source else ""))
        moves = [f"{to} takes {' and '.join(parts)}" for to, parts in texts.items()]
        return ", ".join([*moves, *([f"{actors_text(idle)} wait{'s' * (len(idle) == 1)} for a host"] if idle else [])])

    def _take_from_lost(self, actor: int, host: Host) -> None:
        name = name_of(actor)
        if name in host.pids or name in host.asked:
            pid, number = host.pids.get(name, 0), int(signal.SIGKILL)
            self._exits[actor] = Exit(name, pid, -1, number, ended_with=host.lost, is_reported=True)
        self._leaving.discard(actor)
        self._give(actor)

    def _give(self, actor: int) -> None:
        old, new = self._at[actor], self._to[actor]
        if old is not None:
            old.started.discard(name_of(actor))
        self._at[actor] = new
        self._tokens[actor] = self._ownership.give(actor, here=new is None or new.is_head)
        self._given.add(actor)

    def take_exit(self, gone: Exit) -> bool:
        """Takes the exit of an actor that was ended to be moved; returns False if it is not such an exit."""
        actor = self._indices.get(gone.name)
        if actor is None or actor not in self._leaving:
            return False
        self._leaving.discard(actor)
        self._exits[actor] = Exit(gone.name, gone.pid, -1, int(signal.SIGKILL), is_move=True)
        self._give(actor)
        return True

    def settle(self, *, has_carrier: bool) -> list[Exit] | None:
        """Returns the exits of moved actors once the carrier has seen their moves; None if there is nothing to do.

        From then on these actors may be started.
        """
        if not self._given or (has_carrier and not self._ownership.is_seen):
            return None
        exits, self._exits = list(self._exits.values()), {}
        self._given.clear()
        return exits
