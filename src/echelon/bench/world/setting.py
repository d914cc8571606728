"""What one run of `echelon bench world` is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from echelon.errors import ConfigError

Progress = Callable[[int, int], None]  # (done so far, all of it)
TRANSPORTS = ("local", "tcp")
PEERS = ("torch-rpc", "none")
LEAST_CALLS = 10  # of each figure in a turn, however slow they are


@dataclass(frozen=True, slots=True)
class Setting:
    """Two processes, of which one calls the other; each library has its own two, and they take turns."""

    small: int = 1024  # bytes of the tensor of a round trip
    large: int = 4 << 20  # bytes of the tensor of an echo
    in_flight: int = 64  # calls under way at once where they are counted
    seconds: float = 2.0  # of each figure in a turn
    rounds: int = 4  # turns of each library
    transport: str = "local"
    peer: str = "torch-rpc"

    def __post_init__(self) -> None:
        for name, least in (("small", 4), ("large", 4), ("in_flight", 1), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}.")
        if not 0.0 < self.seconds < math.inf:
            raise ConfigError(f"seconds={self.seconds} must be a number above 0.")
        for name, known in (("transport", TRANSPORTS), ("peer", PEERS)):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name}={value!r} is not known; there are {', '.join(known)}.")
