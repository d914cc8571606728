"""Segments of memory shared by the processes of one host. Imports nothing heavier than numpy."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from echelon.disk import open_own
from echelon.errors import Refused, TransportError

Array = np.ndarray[Any, Any]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def create_segment(path: Path, nbytes: int, reserved: int | None = None) -> Array:
    """Creates a segment of `nbytes` zeros at `path`. Its pages are allocated now, so later writes cannot fail.

    With `reserved`, only so many bytes are; call `reserve` before writing to others.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        _allocate(descriptor, path, 0, nbytes if reserved is None else reserved)
        os.truncate(descriptor, nbytes)
        return _map(descriptor, nbytes)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def reserve(path: Path, start: int, nbytes: int) -> None:
    """Allocates `nbytes` of a segment from `start` on."""
    descriptor = open_own(path, os.O_RDWR)
    try:
        _allocate(descriptor, path, start, nbytes)
    finally:
        os.close(descriptor)


def _allocate(descriptor: int, path: Path, start: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, start, nbytes)
    except OSError as error:
        raise TransportError(f"cannot reserve {nbytes / 2**20:.1f} MiB at {path}: {error.strerror}") from error


def open_segment(path: Path) -> Array:
    """Opens the segment that another process created at `path`."""
    try:
        descriptor = open_own(path, os.O_RDWR)
    except PermissionError as error:
        raise Refused(f"segment {path} is refused: {error.strerror}. Another user may have put it there.") from error
    except OSError as error:
        raise TransportError(f"segment {path} cannot be opened: {error.strerror}; its run has ended") from error
    try:
        return _map(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def join_segment(path: Path, nbytes: int, reserved: int | None = None) -> Array:
    """Opens the segment at `path`, or creates it; processes that call this concurrently get the same."""
    if path.exists():
        return open_segment(path)
    own = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    memory = create_segment(own, nbytes, reserved)
    try:
        os.link(own, path)  # atomic: under its final name the segment is complete
    except FileExistsError:
        return open_segment(path)
    finally:
        os.unlink(own)
    return memory


def _map(descriptor: int, nbytes: int) -> Array:
    """Maps a segment until the last view of it is released.

    Python's mmap keeps a file descriptor open per mapping, and a process is often limited to about a thousand.
    """
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, nbytes).atexit = False  # at exit, live views still use it
    return np.frombuffer(memoryview(memory), np.uint8)
