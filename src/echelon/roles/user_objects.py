"""What a program of the user's brings into a run, as objects of its own process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from echelon.schema import Spaces


class SaveFunction(Protocol):
    """Called after some episodes, with the policy as it is then; `epoch` is the number of episodes learned from."""

    def __call__(self, *, epoch: int, policy: Any) -> object: ...


@dataclass(frozen=True, slots=True)
class UserObjects:
    """A policy of its own, what to call every `save_every` episodes, and spaces where no environment tells them."""

    policy: Any = None
    save: SaveFunction | None = None
    save_every: int = 0
    spaces: Spaces | None = None
    address: str = ""  # where workers come to by now, in a run that is gone on with
