"""A torch.distributed store without a port of its own: the host has the table, members reach it by control calls.

    node.serve("store", StoreTable())                                   # at the host
    store = WorldStore(partial(node.call, "coordinator", "store"))      # at a member

Nothing blocks at the host: a member that waits for a key repeats its request, with pauses from 1 to 50 ms.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from echelon.errors import TransportTimeout

FIRST_PAUSE_S, MAX_PAUSE_S = 0.001, 0.05  # between two requests for a missing key
NAMED_KEYS = 4  # in an error

Ask = Callable[..., Any]  # ask(operation, *args) returns the reply of the table, in whichever process it is


class WorldStore(Store):
    """The store of one process, for torch.distributed: every operation is a request to the host's `StoreTable`.

    `get` and `wait` repeat their request until the key exists, until `timeout_s` is over (TransportTimeout), or until
    `watch` raises. `watch` is called before each request, to detect that the process that should set the key is gone.
    Errors of `ask` pass through torch to the waiting caller. gloo uses the store only while a group is created. nccl
    also uses it at its first operation, and has threads that read keys from time to time. If `ask` works in one thread
    only, as that of a Node does, pass `one_thread`: other threads then find an empty store and cannot change it.
    """

    def __init__(
        self,
        ask: Ask,
        *,
        timeout_s: float = 60.0,
        watch: Callable[[], None] | None = None,
        one_thread: bool = False,
    ) -> None:
        super().__init__()
        self._ask = ask
        self._timeout_s = timeout_s
        self._watch = watch
        self._thread = threading.get_ident() if one_thread else None

    def set(self, key: str, value: str | bytes) -> None:
        if self._is_ours():
            self._ask("set", key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._ask("get", key))

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, value)) if self._is_ours() else 0

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return bytes(self._ask("compare_set", key, _as_bytes(expected_value), _as_bytes(desired_value)))

    def check(self, keys: Sequence[str]) -> bool:
        return self._is_ours() and not self._ask("missing", list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + timeout_s
        pause_s = FIRST_PAUSE_S
        while missing := self._missing(keys):
            if time.monotonic() >= deadline:
                raise TransportTimeout(
                    f"no process set {_named(missing)} in the world's store within {timeout_s:g} s. The process that "
                    "sets it is late, suspended, or was never started."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        return int(self._ask("count"))

    def forget(self, prefix: str) -> None:
        """Removes every key that begins with `prefix`."""
        self._ask("forget", prefix)

    # torch calls these three methods of a store written in Python by their C++ names.
    compareSet = compare_set
    deleteKey = delete_key
    getNumKeys = num_keys

    def has_extended_api(self) -> bool:
        return False

    def _missing(self, keys: Sequence[str]) -> list[str]:
        if self._watch is not None:
            self._watch()
        missing: list[str] = self._ask("missing", list(keys))
        return missing

    def _is_ours(self) -> bool:
        """Whether this thread may use `ask`; for torch's own threads, `set`, `add` and `check` do nothing."""
        return self._thread in (None, threading.get_ident())


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _named(keys: list[str]) -> str:
    more = f" and {len(keys) - NAMED_KEYS} more" if len(keys) > NAMED_KEYS else ""
    return ", ".join(repr(key) for key in keys[:NAMED_KEYS]) + more
