"""The status file: shows health probes whether a process takes part in a run, and that it is not stuck."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from echelon.disk import put_file
from echelon.errors import ConfigError

TOUCH_S = 5.0
JOINED, WAITING = "joined", "waiting"


class StatusFile:
    """A file with the word `joined` or `waiting`. Its modification time is that of the last progress.

    One process writes it, any may read it. It is replaced atomically, and removed when its process leaves. A process
    that is killed leaves it behind: it grows old. Without a path nothing is written.
    """

    def __init__(self, path: str = "") -> None:
        self._path, self._joined, self._touched_at = Path(path) if path else None, False, 0.0
        self._write()

    def report(self, joined: bool) -> None:
        """Shows whether the run is joined, and progress. It is cheap enough to be called at every step."""
        if joined != self._joined:
            self._joined = joined
            self._write()
        else:
            self.touch()

    def touch(self) -> None:
        """Shows progress: the process is not stuck."""
        if self._path is not None and time.monotonic() > self._touched_at + TOUCH_S:
            self._touched_at = time.monotonic()
            with contextlib.suppress(OSError):  # another process has removed it
                os.utime(self._path)

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        if self._path is None:
            return
        self._touched_at = time.monotonic()
        try:
            put_file(self._path, f"{JOINED if self._joined else WAITING}\n".encode(), durable=False)
        except OSError as error:
            raise ConfigError(
                f"--status-file {self._path} cannot be written: {error}. Choose a file in a folder that is writable."
            ) from error
