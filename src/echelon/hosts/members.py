"""What the head knows of each host that joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from echelon.engines.process import ProcessSpec
from echelon.hosts.messages import Command, Start


@dataclass(slots=True)
class Host:
    """An agent that joined."""

    name: str
    token: int
    streams: range  # its actors
    received_at: float
    is_silent: bool = False  # and this was reported
    is_dismissed: bool = False  # it left because the run is over
    commands: list[Command] = field(default_factory=list)
    num_events: int = 0  # the last one that was handled
    pids: dict[str, int] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)  # roles to be started that have not reported a process yet
    lost: str = ""  # why it was given up
    postponed: list[ProcessSpec] = field(default_factory=list)  # to be started at the head when the carrier allows it

    @property
    def summary(self) -> dict[str, Any]:
        starts = [command.spec["name"] for command in self.commands if isinstance(command, Start)]
        return summarize(self.name, self.streams, starts, self.lost)

    @property
    def actors(self) -> str:
        """Its actors as a user reads them: "actor 2", "actors 2 and 3", "actors 2 to 5"."""
        first, last = self.streams.start, self.streams.stop - 1
        if first == last:
            return f"actor {first}"
        return f"actors {first} {'and' if last == first + 1 else 'to'} {last}"


def summarize(name: str, streams: range, starts: Sequence[str], lost: str = "") -> dict[str, Any]:
    """Returns a host's row of the summary; `starts` names the roles that it was asked to start."""
    return {"name": name, "actors": len(streams), "restarts": len(starts) - len(set(starts)), "lost": lost}
