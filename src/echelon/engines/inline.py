"""The inline engine: all roles in the caller's process, stepped in a fixed order, for debugging and reproducibility."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from echelon.engines.process import Exit, OneHost, ProcessSpec, Role, make_role


class MessageLoop(Protocol):
    """Receives messages of the roles."""

    def poll(self, timeout_s: float = 0.0, fds: Sequence[int] = ()) -> bool: ...


class InlineEngine(OneHost):
    """Steps the roles round-robin; an exception in a role reaches the caller unchanged, where a debugger can stop."""

    def __init__(self, timeout_s: float = 0.0) -> None:
        """A role may sleep for `timeout_s` inside a step; 0 where another role of this process must wake it."""
        self._timeout_s = timeout_s
        self._roles: dict[str, Role] = {}
        self._exits: list[Exit] = []

    def is_here(self, name: str) -> bool:
        del name
        return True

    @property
    def has_roles(self) -> bool:
        return bool(self._roles)

    def start(self, spec: ProcessSpec) -> None:
        self._roles[spec.name] = make_role(spec)

    def exits(self) -> list[Exit]:
        exits, self._exits = self._exits, []
        return exits

    def pid(self, name: str) -> int | None:
        del name
        return None

    def signal(self, name: str, number: int) -> None:
        del name, number  # roles of the caller's own process are never killed

    def run(self, world: MessageLoop, timeout_s: float) -> None:
        """Steps the roles for about `timeout_s`, or until one has finished; then polls `world`."""
        end = time.perf_counter() + timeout_s
        while self.turn() and time.perf_counter() < end:
            pass
        world.poll(0.0)

    @property
    def server_pid(self) -> int | None:
        return None  # there is no other process

    def turn(self) -> bool:
        """Steps every role once; returns False if none is left or one has just finished."""
        for name, role in list(self._roles.items()):
            if not role.finished:
                role.step(self._timeout_s)
            if role.finished:
                role.close()
                del self._roles[name]
                self._exits.append(Exit(name, 0, 0, 0))
        return bool(self._roles) and not self._exits

    def close(self, timeout_s: float) -> None:
        del timeout_s
        for role in self._roles.values():
            role.close()
        self._roles.clear()
