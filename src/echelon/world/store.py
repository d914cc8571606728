"""A torch.distributed store that needs no port of its own: the host keeps its table, members ask it by their calls.

    node.serve("store", StoreTable())                                   # at the host
    store = WorldStore(partial(node.call, "coordinator", "store"))      # at a member

Nothing at the host blocks: a member that waits for a key asks again, 20 times a second at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from echelon.errors import TransportTimeout

FIRST_PAUSE_S, MAX_PAUSE_S = 0.001, 0.05  # between two questions for a key that is not there yet
NAMED_KEYS = 4  # in an error

Ask = Callable[..., Any]  # ask(operation, *args): what the table answers, from wherever it is


class WorldStore(Store):
    """The store of one process, for torch.distributed: every operation is a question to the host's `StoreTable`.

    `get` and `wait` ask until the key is there, `timeout_s` is over (TransportTimeout) or `watch` raises: it
    is called before each question and is the place to notice that whoever should set the key is gone. Whatever `ask`
    raises goes through torch to whoever waits. gloo asks only while a group is made; nccl also at its first
    operation, and has threads of its own that look at keys now and then: what they ask is answered from nothing when
    `ask` belongs to one thread, as that of a Node does (`one_thread`).
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
                    f"nobody set {_named(missing)} in the world's store within {timeout_s:g} s. Whoever should have is "
                    "late, stopped, or never came."
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

    # torch calls these three of a store written in Python by their C++ names.
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
        """Whether this thread may ask; torch's own threads may look and tell, but not learn or change anything."""
        return self._thread in (None, threading.get_ident())


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _named(keys: list[str]) -> str:
    more = f" and {len(keys) - NAMED_KEYS} more" if len(keys) > NAMED_KEYS else ""
    return ", ".join(repr(key) for key in keys[:NAMED_KEYS]) + more
