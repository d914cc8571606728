"""Files that only this user may have made, and atomic replacement of folders on disk."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path


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
