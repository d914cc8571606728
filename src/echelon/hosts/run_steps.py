"""The environment steps of the whole run, in shared memory of a host other than the head.

The agent writes what the head sent with the last weights or grants; actors read it for their exploration. It is at
most a fifth of a second older than at the head, plus the time of the link. Needs only numpy.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from echelon.transport.segments import join_segment


class RunSteps:
    """The word that holds the steps."""

    def __init__(self, session: Path) -> None:
        self._word = join_segment(session / "env_steps", 8).view(np.int64)

    def get(self) -> int:
        return int(self._word[0])

    def set(self, env_steps: int) -> None:
        self._word[0] = env_steps
