"""Logs of roles on other hosts: the agent sends what they write, and the head appends it to logs/ in the run folder.

A role that prints more than `MAX_BYTES` between two looks loses the middle of it; its host has the whole log.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from echelon.disk import is_private, open_regular
from echelon.errors import ConfigError
from echelon.transport.session import start_ticks

MAX_BYTES = 64 << 10
MAX_LOGS_S = 24 * 3600.0  # how long logs of failed roles are kept


class LogTails:
    """What the roles of this host have written to their logs since it was last read."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._read = folder, dict[str, int]()  # bytes of each log

    def path(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def new(self, name: str) -> bytes:
        """Returns the new text of a role."""
        with contextlib.suppress(FileNotFoundError):
            before, size = self._read.get(name, 0), self.path(name).stat().st_size
            if size > before:
                start = max(before, size - MAX_BYTES)
                with self.path(name).open("rb") as log:
                    log.seek(start)
                    text = log.read(size - start)
                self._read[name] = size
                skipped = f"[{start - before:,} bytes are only in the log on its host]\n" if start > before else ""
                return skipped.encode() + text
        return b""


def append(path: Path, text: bytes) -> None:
    """Appends to a role's log at the head; a full disk does not end the run."""
    with contextlib.suppress(OSError), open(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "wb") as log:
        log.write(text)


def make_log_folder() -> Path:
    """Makes a folder for the logs of this agent's roles, and removes those of dead agents that are older than a day."""
    for folder in Path(tempfile.gettempdir()).glob("echelon-host-*-*"):
        pid = folder.name.split("-")[2]
        with contextlib.suppress(OSError):  # another agent has just removed it
            is_old = time.time() - folder.lstat().st_mtime > MAX_LOGS_S
            if is_old and is_private(folder) and pid.isdecimal() and start_ticks(int(pid)) is None:
                shutil.rmtree(folder, ignore_errors=True)
    try:
        return Path(tempfile.mkdtemp(prefix=f"echelon-host-{os.getpid()}-"))
    except OSError as error:
        raise ConfigError(
            f"the logs of this host's roles need a folder: {error}. Set TMPDIR to another place."
        ) from error
