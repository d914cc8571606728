"""The hosts that a run waits for at its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.hosts.members import Host


@dataclass(frozen=True, slots=True)
class Quorum:
    """A run starts with at least so many hosts, the head included, and with cores for so many actors."""

    num_hosts: int
    min_actors: int = 0  # 0: all actors run, however few cores there are

    def missing(self, hosts: Sequence[Host]) -> str:
        """Returns what the run waits for, if only `hosts` have joined; nothing if they suffice."""
        if (num := self.num_hosts - len(hosts)) > 0:
            return f"{num} more host{'s' * (num > 1)}"
        if (num := self.min_actors - num_cores(hosts)) > 0:
            return f"hosts with {num} more core{'s' * (num > 1)}"
        return ""

    def without(self, hosts: Sequence[Host]) -> str:
        """Returns the options with which the run starts with `hosts` alone."""
        if self.min_actors:
            return f"--min-actors {min(self.min_actors, num_cores(hosts))} --hosts {len(hosts)}"
        return f"--hosts {len(hosts)}" if len(hosts) > 1 else "--engine local"


def num_cores(hosts: Sequence[Host]) -> int:
    return sum(host.cores for host in hosts)
