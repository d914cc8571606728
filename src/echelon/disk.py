"""Files that only this user may have made, and writes that leave either the old or the new content on disk."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

MAX_WAITING_BYTES = 2**24


def open_own(path: Path | str, flags: int, mode: int = 0o600) -> int:
    """Opens a regular file of this user and returns its descriptor; raises PermissionError on everything else.

    Another user may have put a symbolic link, a FIFO or a file of theirs at a name in a shared folder: a link is not
    followed, and a FIFO does not block.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise PermissionError(errno.EPERM, "not a regular file", str(path)) from error
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    what = "not a regular file" if not stat.S_ISREG(status.st_mode) else f"a file of user {status.st_uid}"
    raise PermissionError(errno.EPERM, what, str(path))


def sync(path: Path) -> None:
    """Flushes a file, or the directory entries of a folder, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_folder(new: Path, target: Path, aside: Path) -> None:
    """Renames the folder `new`, already flushed, to `target`; all three paths have the same parent folder.

    An existing `target` is moved to `aside` first and removed last, so that a crash leaves one of them complete.
    """
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(target, aside)
    os.rename(new, target)
    sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def write_file(path: Path, data: bytes) -> None:
    """Writes `data` to `path` and flushes it to disk; a reader sees the old content or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # it is not there, or the disk is read-only
            temporary.unlink()


class AppendFile:
    """A file to which one process appends records; a record is in it as a whole or not at all.

    A record that cannot be written waits in memory, at most MAX_WAITING_BYTES of them, then the oldest are dropped; the
    next `append` tries again. `error` is the reason while records wait.
    """

    def __init__(self, path: Path, *, is_new: bool) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | (os.O_EXCL if is_new else 0), 0o644)
        self._size, self._is_torn = os.fstat(self._descriptor).st_size, False
        self.waiting, self._waiting_bytes = collections.deque[bytes](), 0
        self.error: OSError | None = None

    def append(self, record: bytes = b"") -> None:
        """Appends the records that wait and `record`."""
        self.waiting.append(record)
        self._waiting_bytes += len(record)
        while self._waiting_bytes > MAX_WAITING_BYTES:
            self._waiting_bytes -= len(self.waiting.popleft())
        self.error = None
        try:
            while self.waiting:
                self._write(self.waiting[0])
                self._waiting_bytes -= len(self.waiting.popleft())
        except OSError as error:
            self.error = error

    def _write(self, record: bytes) -> None:
        if self._is_torn:
            os.ftruncate(self._descriptor, self._size)
        self._is_torn, rest = True, record
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            self._is_torn = False
            raise
        self._is_torn, self._size = False, self._size + len(record)

    def close(self) -> None:
        os.close(self._descriptor)
