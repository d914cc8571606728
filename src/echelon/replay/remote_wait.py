"""The wait of a learner with shards on other hosts: it sleeps on its connections and on the doorbell of its own host.

Imports nothing heavier than numpy and pyzmq.
"""

from __future__ import annotations

import select
from dataclasses import dataclass, field

from echelon.replay.remote import Link
from echelon.transport.channel_client import FIRST_REPEAT_S
from echelon.transport.shared_memory import Doorbell


@dataclass(slots=True)
class RemoteWait:
    """Waits for replies on the learner's links and for appends on its own host."""

    links: list[Link]
    appended: Doorbell
    _descriptors: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._descriptors = [link.descriptor for link in self.links] + [self.appended.descriptor]

    def listen(self) -> None:
        """Clears past appends, so that `wait` ends at the next one. Check for new items again before waiting."""
        self.appended.clear()

    def wait(self, timeout_s: float) -> None:
        """Sends the limiter's counts to the other hosts, then sleeps up to `timeout_s` until a reply or an append."""
        for link in self.links:
            link.send_counts()
        if any([link.poll() for link in self.links]) or any(link.has_message() for link in self.links):
            return
        select.select(self._descriptors, [], [], min(timeout_s, FIRST_REPEAT_S))
