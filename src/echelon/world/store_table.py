"""What the host keeps for the stores of torch.distributed; `store` is the side that asks."""

from __future__ import annotations

import threading
from typing import Any

from echelon.errors import Refused


class StoreTable:
    """The keys and values of every store of a world; any thread of the host may call it, nobody waits in it."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def __call__(self, operation: str, *args: Any) -> Any:
        """Does what a `WorldStore` asks for; raises Refused on anything else."""
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
        raise Refused(f"the store was asked for {str(operation)[:80]!r} with {len(args)} values, which it cannot do.")

    def _add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """The value afterwards: a key that is not there is set only where nothing was expected."""
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
