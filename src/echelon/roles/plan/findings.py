"""What processes find out before a run starts, and leave in its session folder: the preparation and the calibration."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from echelon.schema import Spaces

PREPARED, CALIBRATED = "prepared.json", "calibration.json"
USER_LAYOUT = "user-layout.json"  # how the state of the user's own policy lies on the board


@dataclass(frozen=True, slots=True)
class Prepared:
    """What only the environment, torch and the model can say."""

    spaces: Spaces
    address: str  # where workers come to, if they do
    threads: int  # of the learner
    on_cpu: bool = True  # whether neither the learner nor an inference server would be on a GPU
    state_shapes: tuple[tuple[int, ...], ...] = ()
    weights_bytes: int = 0  # that are published
    slot_bytes: int = 0  # of the ring

    def write(self, path: Path) -> None:
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        path.write_text(json.dumps({**found, "spaces": self.spaces.to_json()}))

    @classmethod
    def read(cls, path: Path) -> Prepared:
        found: dict[str, Any] = json.loads(path.read_text())
        shapes = tuple(tuple(shape) for shape in found["state_shapes"])
        return cls(**{**found, "spaces": Spaces.from_json(found["spaces"]), "state_shapes": shapes})


@dataclass(frozen=True, slots=True)
class CallCost:
    """Seconds of one call: by the clock, and of processors, all threads together."""

    wall_s: float
    cpu_s: float

    def times(self, factor: float) -> CallCost:
        return CallCost(self.wall_s * factor, self.cpu_s * factor)


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found."""

    whole: CallCost  # a step of an actor's environments as local acting has them, all in one group
    part: CallCost  # a step of one of the groups of central acting
    act: CallCost  # the actions of K environments, on one thread
    round: CallCost  # the actions of a server's round
    learn: CallCost  # learning from one step

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Measured:
        return cls(**{name: CallCost(**cost) for name, cost in json.loads(path.read_text()).items()})
