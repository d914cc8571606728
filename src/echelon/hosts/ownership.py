"""The owner of each actor's stream of slots, in shared memory of the head.

The engine sets the owners; the carrier checks them before it writes a slot of another host. A lost host must never
write again, however late its messages arrive: the engine gives its streams to other hosts, and starts the actors there
only when the carrier has seen that or is dead. Needs only numpy.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np

from echelon.transport.segments import join_segment

CHANGES, SEEN = 0, 1
HERE = 0  # the token of the head itself


class Ownership:
    """The owner of each stream: a token that one other host has, or HERE."""

    def __init__(self, session: Path, num_streams: int) -> None:
        words = join_segment(session / "ownership", 8 * (2 + num_streams)).view(np.int64)
        self._words, self._owners = words[:2], words[2:]

    # The engine's side.

    def give(self, stream: int, *, here: bool) -> int:
        """Gives a stream to the head, or to another host; returns the token with which that host proves it.

        The token is new each time: when a stream comes back to a host, its messages of the former time are not valid.
        """
        token = HERE if here else secrets.randbits(62) + 1
        self._owners[stream] = token
        self._words[CHANGES] += 1
        return token

    @property
    def is_seen(self) -> bool:
        """Whether the carrier has seen the last change."""
        return bool(self._words[SEEN] == self._words[CHANGES])

    # The carrier's side.

    def look(self) -> None:
        """Marks the last change as seen: from now on no slot of a former owner is written."""
        self._words[SEEN] = self._words[CHANGES]

    def has(self, stream: int, token: int) -> bool:
        return bool(token != HERE and self._owners[stream] == token)

    def of_others(self) -> list[int]:
        """Returns the streams that other hosts write."""
        return [int(stream) for stream in np.flatnonzero(self._owners != HERE)]
