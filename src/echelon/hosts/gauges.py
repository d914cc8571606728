"""The gauges of roles on other hosts, copied into those of the head. Needs only numpy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from echelon.transport.segments import open_segment

Array = np.ndarray[Any, Any]


class FarGauges:
    """The rows in the head's session of roles that run elsewhere; the supervisor has created them."""

    def __init__(self, session: Path) -> None:
        self._folder = session / "gauges"
        self._rows: dict[str, Array] = {}

    def show(self, rows: Mapping[str, bytes]) -> None:
        """Copies rows, by role; ignores those of another size."""
        for name, row in rows.items():
            if name not in self._rows and (path := self._folder / name).exists():
                self._rows[name] = open_segment(path)
            memory = self._rows.get(name)
            if memory is not None and len(row) == memory.nbytes:
                memory[:] = np.frombuffer(row, np.uint8)
