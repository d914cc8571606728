"""Sleeping on a word of shared memory, and waking those who do: the kernel's futex, by ctypes.

A sleeper names the value it saw, so a change between its look and its sleep is never missed. Sleepers carry a mask of
32 bits and one call wakes all whose mask meets it: an answer to many costs one call. Nothing is held, so nobody who
dies can hold it. The words lie in mapped files, so the processes need share nothing else.
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

# Processes sleep here on x86-64 alone, which `check_platform` sees to; elsewhere one process may ring its own words.
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine(), -1)  # -1: fails and does nothing
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
    """What this process stored before is seen by others before it loads anything after: a lock is a full barrier.

    Of two who each store a word, fence, and load the other's, at least one sees the other.
    """
    with _lock:
        pass


class Word:
    """One 32-bit word of a segment that processes sleep on."""

    def __init__(self, memory: Array) -> None:
        """`memory` is one element of type int32 inside a segment."""
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
        """Sleeps while the word is `seen`, at most `timeout_s`; False after a time-out. May wake for nothing."""
        deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        self._deadline[0], self._deadline[1] = divmod(deadline_ns, 1_000_000_000)
        result = _syscall(
            _SYS_FUTEX, self._address, _WAIT_BITSET, seen & 0xFFFFFFFF, self._deadline_address, None, mask
        )
        return not (result < 0 and ctypes.get_errno() == errno.ETIMEDOUT)

    def wake(self, mask: int = EVERYONE) -> int:
        """Wakes every sleeper whose mask meets `mask`; returns how many."""
        return int(_syscall(_SYS_FUTEX, self._address, _WAKE_BITSET, 0x7FFFFFFF, None, None, mask))
