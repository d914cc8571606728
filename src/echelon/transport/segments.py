"""Segments of memory that processes of one host share. Needs nothing heavier than numpy."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from echelon.errors import ConfigError, TransportError

Array = np.ndarray[Any, Any]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def keeps_store_order() -> bool:
    """Whether other processes see the plain stores of one in program order, as on x86-64."""
    return platform.machine().lower() in ("x86_64", "amd64")


def check_platform() -> None:
    """Refuses processors that reorder stores: a row, a message or weights are published by a later plain store.

    Whatever starts or joins processes that share memory passes here: the local engine, and a member of a world.
    """
    if not keeps_store_order():
        raise ConfigError(
            f"processes cannot share memory on this machine: its processor is {platform.machine()}, and only x86-64 "
            "shows the stores of one process to others in their order. Use a machine with x86-64, or train in one "
            "process with --engine inline."
        )


def create_segment(path: Path, nbytes: int) -> Array:
    """A new segment of `nbytes` zeros at `path`, with its pages reserved: writing to it later cannot fail."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return _map(descriptor, nbytes)
    except OSError as error:
        os.unlink(path)
        raise TransportError(f"cannot reserve {nbytes / 2**20:.1f} MiB at {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def open_segment(path: Path) -> Array:
    """The segment that another process made at `path`."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"segment {path} cannot be joined: {error.strerror}; its run has ended") from error
    try:
        return _map(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def join_segment(path: Path, nbytes: int) -> Array:
    """The segment at `path`, made of `nbytes` if it is not there; whoever else comes at once joins the same."""
    if path.exists():
        return open_segment(path)
    own = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    memory = create_segment(own, nbytes)
    try:
        os.link(own, path)  # under its name it is there as a whole, or not at all
    except FileExistsError:
        return open_segment(path)
    finally:
        os.unlink(own)
    return memory


def _map(descriptor: int, nbytes: int) -> Array:
    """Maps a segment until nothing made of it is left.

    Python's own mmap keeps a descriptor for each, and a process may have no more than a thousand of them.
    """
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, nbytes).atexit = False  # what lives then still uses it
    return np.frombuffer(memoryview(memory), np.uint8)
