"""What one run of `echelon bench replay` is asked for, and what it brings back. Needs only numpy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from echelon.errors import ConfigError

Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]  # (done so far, all of it)
PEERS = ("cpprb", "none")
LEAST_FRAME = 8  # bytes
MODES = {
    "process": "echelon.bench.replay.process:run",
    "writers": "echelon.bench.replay.writers:run",
    "frames": "echelon.bench.replay.frames:run",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: in one process, with `writers` that append from processes of their own, or with `frames`."""

    batch: int = 512
    capacity: int = 1 << 20  # items, over all shards
    chunk: int = 64  # items of one insert
    observation: int = 8  # float32 numbers of an observation; an item has two
    shards: int = 0  # 0: one, or one for each writer
    writers: int = 0
    rate: float = 25_000.0  # items that each writer appends in a second
    frames: str = ""  # height x width x stack
    alpha: float = 0.6
    seconds: float = 2.0  # of each measurement: one operation of one buffer
    rounds: int = 20  # turns that a measurement is cut into
    peer: str = "cpprb"
    shm_dir: str = "/dev/shm"

    def __post_init__(self) -> None:
        for name, least in (
            ("batch", 1),
            ("chunk", 1),
            ("observation", 1),
            ("shards", 0),
            ("writers", 0),
            ("rounds", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}.")
        for name in ("rate", "seconds"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)} must be a number above 0.")
        if not 0.0 < self.alpha <= 1.0:
            raise ConfigError(f"alpha={self.alpha} must lie above 0 and be at most 1: the bench draws by priority.")
        if self.peer not in PEERS:
            raise ConfigError(f"peer={self.peer!r} is not known; there are {', '.join(PEERS)}.")
        if self.frames and not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", self.frames):
            raise ConfigError(f"frames={self.frames!r} is not height x width x stack. Write it as in --frames 84x84x4.")
        if self.frames and self.frame_bytes < LEAST_FRAME:
            raise ConfigError(f"frames={self.frames} are smaller than {LEAST_FRAME} pixels, which carry their number.")
        if self.writers and self.shards not in (0, self.writers):
            raise ConfigError(
                f"shards={self.shards} and writers={self.writers}: every writer has a shard of its own. Leave --shards "
                "out, or make it the number of writers."
            )
        if self.frames and (self.writers or self.shards > 1):
            raise ConfigError(
                f"frames={self.frames} is measured in one process with one shard, not with writers={self.writers} and "
                f"shards={self.shards}. Leave those out."
            )
        if self.shard_capacity < max(self.batch, self.chunk):
            raise ConfigError(
                f"capacity={self.capacity} gives each of {self.num_shards} shards {self.shard_capacity} items, but one "
                f"must hold a batch of {self.batch} and a chunk of {self.chunk}. Raise --capacity."
            )

    @property
    def mode(self) -> str:
        return "frames" if self.frames else "writers" if self.writers else "process"

    @property
    def num_shards(self) -> int:
        return self.shards or max(1, self.writers)

    @property
    def shard_capacity(self) -> int:
        return self.capacity // self.num_shards

    @property
    def stack(self) -> tuple[int, int, int]:
        """The shape of an observation of frames: the stack, height, width."""
        height, width, depth = (int(size) for size in self.frames.split("x"))
        return depth, height, width

    @property
    def frame_bytes(self) -> int:
        """One frame: a byte for a pixel."""
        return math.prod(self.stack[1:])

    @property
    def turn_s(self) -> float:
        """The time of one operation of one buffer in one round."""
        return self.seconds / self.rounds


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the rounds: its median, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: list[float]) -> Spread:
        low, median, high = np.percentile(rounds, (25, 50, 75)).tolist()
        return cls(median, low, high)


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure, for each buffer that was measured; the peer stands beside ours, `ratio` is ours over the peer's."""

    name: str
    unit: str
    by: Mapping[str, Spread]
    ratio: float | None = None  # the median over the rounds, each of which compares neighbours in time

    @classmethod
    def of(cls, name: str, unit: str, rounds: Mapping[str, list[float]]) -> Measure:
        ours, *peers = rounds.values()
        ratios = [one / other for peer in peers[:1] for one, other in zip(ours, peer, strict=True) if other]
        ratio = float(np.median(ratios)) if ratios else None
        return cls(name, unit, {who: Spread.of(values) for who, values in rounds.items()}, ratio)


@dataclass(frozen=True, slots=True)
class Result:
    """What one run measured."""

    measures: tuple[Measure, ...]
    facts: Mapping[str, int | float] = field(default_factory=dict)  # what is counted once


def run(setting: Setting, progress: Progress) -> Result:
    """Measures `setting` in its mode, whose module is imported only now."""
    module, _, function = MODES[setting.mode].partition(":")
    result: Result = getattr(import_module(module), function)(setting, progress)
    return result
