"""The host's table of the torch.distributed stores; module `store` has the clients."""

from __future__ import annotations

import threading
from typing import Any

from echelon.errors import Refused


class StoreTable:
    """The keys and values of all stores of a world; any thread of the host may call it, and no call blocks."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def __call__(self, operation: str, *args: Any) -> Any:
        """Runs an operation of a `WorldStore`; raises Refused on anything else."""
        with self._lock:
            match (operation, *args):
                case "set", str(key), bytes(value):
                    self._values[key] = value
                    return None
                case "get", str(key):
                    return self._values.get(key)
                case "add", str(key), int(amount):
                    return self._add(key, amount)
                case "compare_set", str(key), bytes(expected), bytes(desired):
                    return self._compare_set(key, expected, desired)
                case "delete", str(key):
                    return self._values.pop(key, None) is not None
                case "missing", list(keys):
                    return [key for key in keys if key not in self._values]
                case ("count",):
                    return len(self._values)
                case "forget", str(prefix):
                    return self._forget(prefix)
        raise Refused(f"the store has no operation {str(operation)[:80]!r} with these {len(args)} arguments.")

    def _add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Returns the value afterwards; a missing key is set only if `expected` is empty."""
        value = self._values.get(key)
        if value is None and expected:
            return expected
        if value is None or value == expected:
            self._values[key] = value = desired
        return value

    def _forget(self, prefix: str) -> int:
        gone = [key for key in self._values if key.startswith(prefix)]
        for key in gone:
            del self._values[key]
        return len(gone)
