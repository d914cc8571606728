"""The result of the preparation, which it writes to the session folder before a run starts."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from echelon.schema import Spaces

PREPARED = "prepared.json"
USER_LAYOUT = "user-layout.json"  # the layout of a user policy's state on the weights board


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of the preparation: values that require the environment, torch or the model."""

    spaces: Spaces
    address: str  # to which workers connect, in a run with workers
    threads: int  # of the learner
    device: str = "cpu"  # of the learner
    act_s: float | None = None  # to choose the actions of an actor on one core, if a server could do it on a GPU
    state_shapes: tuple[tuple[int, ...], ...] = ()
    weights_bytes: int = 0  # of the published weights
    slot_bytes: int = 0  # of the ring
    warnings: tuple[str, ...] = ()  # of the check of the environment

    def write(self, path: Path) -> None:
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        path.write_text(json.dumps({**found, "spaces": self.spaces.to_json()}))

    @classmethod
    def read(cls, path: Path) -> Prepared:
        found: dict[str, Any] = json.loads(path.read_text())
        shapes = tuple(tuple(shape) for shape in found["state_shapes"])
        spaces, warnings = Spaces.from_json(found["spaces"]), tuple(found["warnings"])
        return cls(**{**found, "spaces": spaces, "state_shapes": shapes, "warnings": warnings})
