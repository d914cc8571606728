"""The archive: the snapshots that go with the checkpoints of a run, one written at a time, the newest whole one kept.

Who waits: nobody. The learner makes the cut and goes on; a thread writes, as the kernel may sleep long over the disk,
and then removes what the new snapshot replaces. Writing, copying and checksums leave the interpreter to the learner. A
checkpoint that comes while one is being written gets none. If the disk fails or is full, the half-written one is
removed, the one before it stays, and `news` says so once; the next checkpoint tries again. If the process dies, the
next one that is begun removes what it left. Needs only numpy.
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
    """The folder of a run's snapshots, named as its checkpoints are. One process writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.news: list[str] = []  # what went wrong; the caller shows and clears it
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None
        self._is_reported = False

    def newest_first(self) -> list[Path]:
        """The snapshots that are there, unread; before anything is written."""
        for aside in self.folder.glob("*.old"):  # somebody died between two renames
            if not aside.with_suffix("").exists():
                aside.rename(aside.with_suffix(""))
        found = [path for path in self.folder.glob("step_*") if NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.name, reverse=True)

    def check_fits(self, nbytes: int) -> None:
        """Refuses a disk without room for snapshots of `nbytes`: the one before stays until the next is whole."""
        there = next(path for path in (self.folder, *self.folder.parents) if path.is_dir())
        held = sum(path.stat().st_size for path in self.folder.rglob("*")) if there == self.folder else 0
        free = shutil.disk_usage(there).free + held
        where = f"in {self.folder}, twice what a full replay takes"
        check_fits(2 * nbytes, "replay.checkpoint=true", Free(free, where, "make room, or name another --run-dir."))

    @property
    def is_writing(self) -> bool:
        """Whether one is being written; what became of it is known from the first False on."""
        if self._writer is not None and not self._writer.is_alive():
            self._writer = None
            failure, self._failure = self._failure, None
            if isinstance(failure, OSError):
                self._report(f"the replay could not be written to {self.folder}: {failure}. ")
            elif failure is not None:
                raise failure
            else:
                self._is_reported = False
        return self._writer is not None

    def begin(self, name: str, replay: Replay | Seen, limiter: Limiter) -> None:
        """Begins to write what the replay holds now, unless another is being written."""
        if self.is_writing:
            return
        snapshot = Snapshot(self.folder / name, replay, limiter)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            self._report(f"the replay could not be written to {self.folder}: {error}. ")
            return
        if snapshot.nbytes > free:
            needed, left = f"{snapshot.nbytes / 1e6:,.1f} MB", f"{free / 1e6:,.1f} MB"
            self._report(f"the replay needs {needed} in {self.folder}, where {left} are free. ")
            return
        self._writer = threading.Thread(target=self._write, args=(snapshot,), name="replay snapshot", daemon=True)
        self._writer.start()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the one that is being written, at most `timeout_s`; whether it is done."""
        if self._writer is not None:
            self._writer.join(timeout_s)
        return not self.is_writing

    def _write(self, snapshot: Snapshot) -> None:
        """The thread: writes, and removes all others."""
        try:
            for left in self.folder.glob("*.part"):
                shutil.rmtree(left, ignore_errors=True)
            snapshot.write()
            for path in self.folder.glob("step_*"):
                if path != snapshot.path:
                    shutil.rmtree(path, ignore_errors=True)
        except Exception as error:  # raised or told where the caller looks
            self._failure = error

    def _report(self, what: str) -> None:
        """Once, until one is written again."""
        if not self._is_reported:
            self.news.append(
                f"{what}Training goes on; a resumed run gets the last snapshot that was written, if any. Free some "
                "room, or lower replay.capacity."
            )
        self._is_reported = True
