"""The hosted engine: some roles run in the caller's process, with its objects, the others as local processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from echelon.engines.inline import InlineEngine, MessageLoop
from echelon.engines.local import LocalEngine
from echelon.engines.process import Exit, ProcessSpec

TURN_S = 0.02  # how long a role may sleep inside one step, so that the coordinator gets its turn


class HostedEngine(LocalEngine):
    """Steps the roles named in `here` in the caller's process; their exceptions reach the caller unchanged."""

    def __init__(self, session: str, preload: Sequence[str], here: Collection[str]) -> None:
        super().__init__(session, preload)
        self._here, self._inline = frozenset(here), InlineEngine(TURN_S)

    def is_here(self, name: str) -> bool:
        return name in self._here

    def start(self, spec: ProcessSpec) -> None:
        (self._inline.start if self.is_here(spec.name) else super().start)(spec)

    def run(self, world: MessageLoop, timeout_s: float) -> None:
        """Steps the roles of this process for about `timeout_s`, or until one has finished; then polls `world`."""
        (self._inline.run if self._inline.has_roles else super().run)(world, timeout_s)

    def exits(self) -> list[Exit]:
        return self._inline.exits() + super().exits()

    def close(self, timeout_s: float) -> None:
        self._inline.close(timeout_s)
        super().close(timeout_s)
