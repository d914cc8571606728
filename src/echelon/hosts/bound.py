"""The roles that a host has besides its actors: its inference server, and its learner if every host has one."""

from __future__ import annotations

import itertools
import signal

from echelon.engines.process import Exit
from echelon.hosts.members import Host


class BoundRoles:
    """Which other host has each of these roles; those that have none are at the head."""

    def __init__(self) -> None:
        self._hosts: dict[str, Host] = {}  # by role; inference servers of lost hosts, too
        self._joined: list[Host] = []  # hosts whose roles were not requested yet
        self._numbers = itertools.count(1)

    def equip(self, host: Host, *, has_server: bool, has_learner: bool) -> None:
        """Gives a host its number, and with that its roles."""
        host.number = next(self._numbers)
        kinds = ["inference"] * has_server + ["learner"] * has_learner
        host.roles = [f"{kind}-{host.number}" for kind in kinds]
        self._hosts |= dict.fromkeys(host.roles, host)
        self._joined.append(host)

    def of(self, name: str) -> Host | None:
        return self._hosts.get(name)

    def joined(self) -> list[int]:
        """Returns the numbers of the hosts that were equipped since the last call."""
        joined, self._joined = self._joined, []
        return [host.number for host in joined if not host.lost]

    def lose(self, host: Host) -> list[Exit]:
        """Returns the exits of the roles of a lost host: its learner starts at the head, its server nowhere."""
        exits = []
        for name in host.started.intersection(host.roles):
            pid, is_final = host.pids.get(name, 0), not name.startswith("learner-")
            gone = Exit(name, pid, -1, int(signal.SIGKILL), ended_with=host.lost, is_reported=True, is_final=is_final)
            exits.append(gone)
            if not is_final:
                del self._hosts[name]
        return exits
