"""What the head knows of each host that takes part, itself included."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from echelon.hosts.cpus import own_cpus
from echelon.hosts.messages import Command

SILENT_S = 5.0  # before the user is warned of a silent host


@dataclass(slots=True, eq=False)
class Host:
    """The head, or an agent that joined."""

    name: str
    cores: int
    is_head: bool = False
    cpus: str = field(default_factory=own_cpus)
    received_at: float = 0.0
    number: int = 0  # unique in the run, from the start of its first role on; the head is 0
    actors: list[int] = field(default_factory=list)  # those that it has, or gets as soon as they have ended elsewhere
    is_silent: bool = False  # and this was reported
    is_dismissed: bool = False  # it left because the run is over
    commands: list[Command] = field(default_factory=list)
    num_events: int = 0  # the last one that was handled
    num_stored: int = 0  # the last operation on the store
    stored: bytes = b""  # its packed result
    pids: dict[str, int] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)  # roles to be started that have not reported a process yet
    logs: dict[str, str] = field(default_factory=dict)  # the files of its roles' logs at the head
    started: set[str] = field(default_factory=set)  # actors that it has been asked to start since it has them
    restarts: int = 0
    lost: str = ""  # why it was given up
    roles: list[str] = field(default_factory=list)  # of another host, besides its actors

    @property
    def label(self) -> str:
        """Its name in a message to the user, who sits at the head."""
        return "this host" if self.is_head else self.name

    @property
    def summary(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "cpus": self.cpus,
            "cores": self.cores,
            "actors": len(self.actors),
            "restarts": self.restarts,
            "lost": self.lost,
        }

    def note_silence(self, silent_s: float, left_s: float) -> str:
        """Returns a message if the host has become silent, `left_s` before it is given up, or is back; else nothing."""
        was_silent, self.is_silent = self.is_silent, silent_s > SILENT_S and (self.is_silent or bool(self.actors))
        if self.is_silent and not was_silent:
            soon = f"the run starts its {actors_text(self.actors)} elsewhere in {left_s:.0f} s unless it is back"
            return f"host {self.name} has been silent for {silent_s:.0f} s; {soon}"
        return f"host {self.name} is back" if was_silent and not self.is_silent else ""

    def note_start(self, name: str) -> bool:
        """Counts a start; returns whether the actor is new on this host."""
        is_new = name not in self.started
        self.started.add(name)
        self.restarts += not is_new
        return is_new


def unique_name(name: str, hosts: Sequence[Host]) -> str:
    """Returns `name`, or NAME-2, NAME-3 and so on where hosts of that name take part."""
    names = {host.name for host in hosts}
    others = (f"{name}-{number}" for number in itertools.count(2))
    return name if name not in names else next(other for other in others if other not in names)


def actors_text(actors: Sequence[int]) -> str:
    """Returns actors as a user reads them: "actor 2", "actors 2 and 3", "actors 2 to 5", "actors 1, 4 and 7"."""
    *most, last = actors
    if not most:
        return f"actor {last}"
    if len(actors) > 2 and last - actors[0] == len(most):
        return f"actors {actors[0]} to {last}"
    return f"actors {', '.join(map(str, most))} and {last}"
