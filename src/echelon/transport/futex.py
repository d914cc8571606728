"""Waiting on a word of shared memory and waking its waiters: the kernel's futex, called through ctypes.

A waiter passes the value it has read, so a change between its read and its sleep is never missed. Each waiter has a
32-bit mask, and one call wakes all waiters whose mask overlaps the given one: a reply to many clients costs one call. A
futex is not a lock, so a process that dies holds nothing. The words are in memory-mapped files, so the processes share
nothing else.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import threading
import time
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
EVERYONE = 0xFFFFFFFF
NUM_MASKS = 32

# Several processes wait on words on x86-64 only (`check_platform`); elsewhere a single process may wake its own words.
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine(), -1)  # -1: an invalid call, no effect
_WAIT_BITSET, _WAKE_BITSET = 9, 10
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
)


_lock = threading.Lock()


def fence() -> None:
    """Orders this process's earlier stores before its later loads: acquiring a lock is a full memory barrier.

    If two processes each store a word, fence, and load the other's word, at least one of them sees the other's store.
    """
    with _lock:
        pass


class Word:
    """One 32-bit word of a segment, on which processes wait."""

    def __init__(self, memory: Array) -> None:
        """Wraps `memory`, one int32 element of a segment."""
        assert memory.dtype == np.int32 and memory.size == 1
        self._memory = memory.reshape(1).data  # keeps the mapping alive; plain integers are faster than numpy's
        self._address = memory.ctypes.data
        deadline = np.zeros(2, np.int64)  # a timespec: seconds, nanoseconds
        self._deadline, self._deadline_address = deadline.data, deadline.ctypes.data

    @property
    def value(self) -> int:
        return self._memory[0]

    @value.setter
    def value(self, value: int) -> None:
        self._memory[0] = value

    def wait(self, seen: int, timeout_s: float, mask: int = EVERYONE) -> bool:
        """Sleeps while the word equals `seen`, at most `timeout_s`; returns False on timeout. May wake spuriously."""
        deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        self._deadline[0], self._deadline[1] = divmod(deadline_ns, 1_000_000_000)
        result = _syscall(
            _SYS_FUTEX, self._address, _WAIT_BITSET, seen & 0xFFFFFFFF, self._deadline_address, None, mask
        )
        return not (result < 0 and ctypes.get_errno() == errno.ETIMEDOUT)

    def wake(self, mask: int = EVERYONE) -> int:
        """Wakes every waiter whose mask overlaps `mask`; returns how many were woken."""
        return int(_syscall(_SYS_FUTEX, self._address, _WAKE_BITSET, 0x7FFFFFFF, None, None, mask))
