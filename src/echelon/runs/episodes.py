"""The episodes of a run: one line of `episodes.csv` for each training episode that ended."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.disk import AppendFile, open_regular

if TYPE_CHECKING:
    import numpy as np

EPISODES = "episodes.csv"
# wall_s: seconds of the run until the learner had the end of the episode; env: index among those of the actor; seed:
# that of the run. A cell is empty where the value is not known.
COLUMNS = ("env_steps", "wall_s", "return", "length", "actor", "env", "seed")
INTEGERS = ("env_steps", "length", "actor", "env", "seed")
HEADER = ",".join(COLUMNS).encode() + b"\n"
MAX_BYTES = 1 << 28  # of the file: about 6 million episodes; no more are written
BLOCK_BYTES = 1 << 20


class EpisodeWriter:
    """Appends the episodes of a report at a time. Those that cannot be written wait in memory (`AppendFile`)."""

    def __init__(self, run_dir: Path, *, append: bool) -> None:
        self.path = run_dir / EPISODES
        self.file = AppendFile(self.path, is_new=not append)
        if not self.file.size:
            self.file.append(HEADER)

    @property
    def error(self) -> OSError | None:
        """Why the newest episodes are not in the file yet; None if they are."""
        return self.file.error

    @property
    def is_full(self) -> bool:
        return self.file.size >= MAX_BYTES

    def write(self, episodes: Mapping[str, np.ndarray[Any, Any]], seed: int) -> None:
        """Appends episodes, given as columns, of a run with this seed; -1 is an unknown actor or environment."""
        if self.is_full:
            return
        rows = zip(*(episodes[name].tolist() for name in COLUMNS[:-1]), strict=True)
        lines = (
            f"{steps},{wall_s:.3f},{value:.9g},{length},{_known(actor)},{_known(env)},{seed}\n"
            for steps, wall_s, value, length, actor, env in rows
        )
        self.file.append("".join(lines).encode())

    def drop_after(self, env_steps: int) -> None:
        """Removes the episodes that were counted after `env_steps`, and an incomplete last line.

        Training continues from there, so they would be counted twice. They are near the end of the file.
        """
        with open(open_regular(self.path, os.O_RDWR), "r+b") as file:
            end, kept, is_changed = file.seek(0, os.SEEK_END), b"", True
            while end and is_changed:
                start = max(0, end - BLOCK_BYTES)
                file.seek(start)
                data = file.read(end - start)
                cut = data.find(b"\n") + 1 if start else 0  # the first line may have lost its beginning
                lines = data[cut:].splitlines(keepends=True)
                left = [line for line in lines if line.endswith(b"\n") and _steps(line) <= env_steps]
                end, kept, is_changed = start + cut, b"".join(left) + kept, len(left) < len(lines)
            file.seek(end)
            file.write(kept)
        self.file.truncate(end + len(kept))
        if not self.file.size:
            self.file.append(HEADER)


def _known(index: int) -> int | str:
    return index if index >= 0 else ""


def _steps(line: bytes) -> int:
    """Returns the environment steps of a line; 0 for the header."""
    first = line.partition(b",")[0]
    return int(first) if first.isdigit() else 0
