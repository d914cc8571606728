"""The results of the preparation and the calibration, which they write to the session folder before a run starts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from echelon.schema import Spaces

PREPARED, CALIBRATED = "prepared.json", "calibration.json"
USER_LAYOUT = "user-layout.json"  # the layout of a user policy's state on the weights board


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of the preparation: values that require the environment, torch or the model."""

    spaces: Spaces
    address: str  # to which workers connect, in a run with workers
    threads: int  # of the learner
    device: str = "cpu"  # of the learner
    on_cpu: bool = True  # False if the learner or an inference server would use a GPU
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


@dataclass(frozen=True, slots=True)
class CallCost:
    """Seconds of one call: wall-clock time, and CPU time summed over all threads."""

    wall_s: float
    cpu_s: float

    def times(self, factor: float) -> CallCost:
        return CallCost(self.wall_s * factor, self.cpu_s * factor)


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a calibration."""

    whole: CallCost  # one step of all K environments of an actor in a single group, as with local acting
    part: CallCost  # one step of one group, as with central acting
    act: CallCost  # choosing the actions of K environments on one thread
    round: CallCost  # choosing the actions of one round of an inference server
    learn: CallCost  # learning from one environment step

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Measured:
        return cls(**{name: CallCost(**cost) for name, cost in json.loads(path.read_text()).items()})
