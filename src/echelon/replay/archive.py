"""The archive: the replay snapshots of a run's checkpoints. One is written at a time; the newest complete one is kept.

Who waits: no one. The learner makes the cut and continues. A thread writes the snapshot, because disk writes may block
for long, and then removes the snapshots that it replaces. Writing, copying and checksums release the GIL. A checkpoint
saved while a snapshot is being written gets no snapshot. If the disk fails or is full, the incomplete snapshot is
removed, the previous one is kept, and `error` is set; the next checkpoint tries again. If the process dies, the next
snapshot removes the incomplete one. Imports only numpy.
"""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path

from echelon.memory_check import Free, check_fits
from echelon.replay.limiter import Limiter
from echelon.replay.reader import Seen
from echelon.replay.sharded import Replay
from echelon.replay.snapshot import Snapshot

NAME = re.compile(r"step_\d{12,}")


class Archive:
    """The folder of a run's snapshots, which have the names of its checkpoints. Only one process writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.error: str | None = None  # why the last snapshot failed, "" if it is written; None if there was none
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None

    def newest_first(self) -> list[Path]:
        """Returns the paths of the existing snapshots, unchecked. Call it before anything is written."""
        for aside in self.folder.glob("*.old"):  # a process died between two renames
            if not aside.with_suffix("").exists():
                aside.rename(aside.with_suffix(""))
        found = [path for path in self.folder.glob("step_*") if NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.name, reverse=True)

    def check_fits(self, nbytes: int) -> None:
        """Raises ConfigError if the disk cannot hold two snapshots of `nbytes`: the old one is kept until the new one
        is complete.
        """
        there = next(path for path in (self.folder, *self.folder.parents) if path.is_dir())
        held = sum(path.stat().st_size for path in self.folder.rglob("*")) if there == self.folder else 0
        free = shutil.disk_usage(there).free + held
        where = f"in {self.folder}, twice what a full replay takes"
        check_fits(2 * nbytes, "replay.checkpoint=true", Free(free, where, "make room, or name another --run-dir."))

    @property
    def is_writing(self) -> bool:
        """Whether a snapshot is being written. The first False after a write also sets `error`, or raises a bug."""
        if self._writer is not None and not self._writer.is_alive():
            self._writer = None
            failure, self._failure = self._failure, None
            if failure is not None and not isinstance(failure, OSError):
                raise failure
            self.error = str(failure or "")
        return self._writer is not None

    def begin(self, name: str, replay: Replay | Seen, limiter: Limiter) -> None:
        """Starts to write the current content of the replay, unless another snapshot is being written."""
        if self.is_writing:
            return
        snapshot = Snapshot(self.folder / name, replay, limiter)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            self.error = str(error)
            return
        if snapshot.nbytes > free:
            needed, left = f"{snapshot.nbytes / 1e6:,.1f} MB", f"{free / 1e6:,.1f} MB"
            self.error = f"a snapshot needs {needed}, and {left} are free"
            return
        self._writer = threading.Thread(target=self._write, args=(snapshot,), name="replay snapshot", daemon=True)
        self._writer.start()

    def wait(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for the snapshot that is being written; returns whether none is being written now."""
        if self._writer is not None:
            self._writer.join(timeout_s)
        return not self.is_writing

    def _write(self, snapshot: Snapshot) -> None:
        """Writes the snapshot and removes all others; runs in the thread."""
        try:
            for left in self.folder.glob("*.part"):
                shutil.rmtree(left, ignore_errors=True)
            snapshot.write()
            for path in self.folder.glob("step_*"):
                if path != snapshot.path:
                    shutil.rmtree(path, ignore_errors=True)
        except Exception as error:  # `is_writing` reports or raises it
            self._failure = error
