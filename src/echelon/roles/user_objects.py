"""Objects of the caller's program that a run uses; they stay in the caller's process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from echelon.schema import Spaces


class SaveFunction(Protocol):
    """Called every `save_every` episodes with the current policy; `epoch` is the number of episodes learned from."""

    def __call__(self, *, epoch: int, policy: Any) -> object: ...


@dataclass(frozen=True, slots=True)
class UserObjects:
    """A user policy, a function to call every `save_every` episodes, and the spaces if there is no environment."""

    policy: Any = None
    save: SaveFunction | None = None
    save_every: int = 0
    spaces: Spaces | None = None
    address: str = ""  # the address to which workers connect, if the run is resumed with a new one
