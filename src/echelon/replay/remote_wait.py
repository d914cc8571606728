"""How a learner with shards on other hosts sleeps: on its connections, and on the doorbell of its own host.

Needs nothing heavier than numpy and pyzmq.
"""

from __future__ import annotations

import select
from dataclasses import dataclass, field

from echelon.replay.remote import Link
from echelon.transport.channel_client import FIRST_REPEAT_S
from echelon.transport.shared_memory import Doorbell


@dataclass(slots=True)
class RemoteWait:
    """What a learner with links listens to while it waits: their answers, and the appends of its own host."""

    links: list[Link]
    appended: Doorbell
    _descriptors: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._descriptors = [link.descriptor for link in self.links] + [self.appended.descriptor]

    def listen(self) -> None:
        """From here on, an append ends a `wait`; look once more before waiting."""
        self.appended.clear()

    def wait(self, timeout_s: float) -> None:
        """Sleeps until something came, at most `timeout_s`; tells the other hosts before how things stand here."""
        for link in self.links:
            link.send_counts()
        if any([link.poll() for link in self.links]) or any(link.has_mail() for link in self.links):
            return
        select.select(self._descriptors, [], [], min(timeout_s, FIRST_REPEAT_S))
