"""Files that others may have put there or only this user may have made, and writes that are atomic."""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAX_JSON_DEPTH = 100
MAX_JSON_BYTES = 16 << 20  # parsed, it takes up to 25 times as much memory
MAX_WAITING_BYTES = 2**24
KINDS = {stat.S_IFREG: "regular file", stat.S_IFIFO: "FIFO"}


def open_regular(path: Path | str, flags: int, mode: int = 0o666, kind: int = stat.S_IFREG) -> int:
    """Opens a regular file, or a file of this `kind`; returns its descriptor. Raises PermissionError on others.

    Somebody else may have put a symbolic link, a FIFO or a device at the name: a link is not followed, and a FIFO does
    not block.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise _not(kind, path) from error
    if stat.S_IFMT(os.fstat(descriptor).st_mode) == kind:
        return descriptor
    os.close(descriptor)
    raise _not(kind, path)


def open_own(path: Path | str, flags: int, mode: int = 0o600, kind: int = stat.S_IFREG) -> int:
    """Opens a file of this user, as `open_regular`; raises PermissionError if it is another user's."""
    descriptor = open_regular(path, flags, mode, kind)
    owner = os.fstat(descriptor).st_uid
    if owner == os.geteuid():
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, f"a {KINDS[kind]} of user {owner}", str(path))


def check_regular(paths: Iterable[Path]) -> None:
    """Raises PermissionError if one of `paths`, or an entry below one, is neither a regular file nor a folder."""
    left = list(paths)
    while left:
        path = left.pop()
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(mode):
            left += path.iterdir()
        elif not stat.S_ISREG(mode):
            raise _not(stat.S_IFREG, path)


def _not(kind: int, path: Path | str) -> PermissionError:
    return PermissionError(errno.EPERM, f"not a {KINDS[kind]} (a link, a device or another kind of file)", str(path))


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Returns the content of a regular file; raises OSError if it is larger than `max_bytes`."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(
                errno.EFBIG, f"it has {size:,} bytes, more than the {max_bytes:,} that can be read", str(path)
            )
        return file.read(size)


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; raises OSError or, unless it is strict JSON, ValueError."""
    try:
        data = json.loads(read_regular(path, MAX_JSON_BYTES), parse_constant=_refuse_constant)
        json.dumps(data, ensure_ascii=False).encode()  # half a surrogate pair cannot be written or printed
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level = [data]
    for _ in range(MAX_JSON_DEPTH):  # far from where functions that call themselves fail
        level = [item for one in level if isinstance(one, dict | list) for item in _items(one)]
    if level:
        raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} levels deep")
    return data


def _items(one: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return one.values() if isinstance(one, dict) else one


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def put_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replaces a file atomically; `durable` flushes it to disk. A link at `path` is replaced, not followed."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # nobody can have put something there
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # it is not there, or the disk is read-only
            temporary.unlink()


def is_private(folder: Path | str) -> bool:
    """Returns whether `folder` is a folder of this user, not a link to one, that no other user can enter."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


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


class AppendFile:
    """A file to which one process appends records; a record is in it as a whole or not at all.

    A record that cannot be written waits in memory, at most MAX_WAITING_BYTES of them, then the oldest are dropped; the
    next `append` tries again. `error` is the reason while records wait.
    """

    def __init__(self, path: Path, *, is_new: bool) -> None:
        self._descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | (os.O_EXCL if is_new else 0))
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

    @property
    def size(self) -> int:
        """Bytes of the records in the file."""
        return self._size

    def truncate(self, size: int) -> None:
        """Shortens the file to `size` bytes, which end with a record."""
        os.ftruncate(self._descriptor, size)
        self._size, self._is_torn = size, False

    def close(self) -> None:
        os.close(self._descriptor)
