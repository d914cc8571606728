"""The counts in a checkpoint, checked: how far the run was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from echelon.errors import ConfigError

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]  # it stays exact as a float, and a sum of two fits a shared word


class SavedCounters(msgspec.Struct, frozen=True):
    """`Counters` of the learner, as in a checkpoint."""

    env_steps: Count
    episodes: Count
    updates: Count
    dropped: Count
    returns: list[float]
    lag_sum: float = 0.0
    lag_steps: Count = 0
    lag_max: Count = 0
    return_max: float | None = None
    lengths: list[Count] = []


class Progress(msgspec.Struct, frozen=True):
    """The part of a checkpoint that says how far the run was."""

    counters: SavedCounters
    wall_s: Annotated[float, msgspec.Meta(ge=0, le=1e10)]
    version: Count = 0
    generation: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0  # the old name of `generation`
    learning_rate: Annotated[float, msgspec.Meta(gt=0, le=1e10)] | None = None  # that a callback has set

    @classmethod
    def read(cls, tree: Any, path: Path) -> Progress:
        """Returns the progress in the tree of the checkpoint at `path`; raises ConfigError if it is not valid."""
        try:
            return msgspec.convert(_plain(tree), cls)
        except msgspec.ValidationError as error:
            raise misfit(path, str(error)) from error


NAMES = Progress.__struct_fields__


def misfit(path: Path, what: str) -> ConfigError:
    """Returns the error for a checkpoint whose content is intact but not that of the run."""
    return ConfigError(
        f"the checkpoint {path} does not fit this run: {what}. Remove it to resume from an earlier one, or start a new "
        "run."
    )


def _plain(value: Any) -> Any:
    """Returns the counts of `value` with numpy's numbers, which old checkpoints hold, as Python's."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items() if name in NAMES + SavedCounters.__struct_fields__}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
