"""The items that the replay benchmark inserts: transitions of random numbers, ready before the clock runs.

All numbers are whole, so that sums over an item are exact in whatever order they are taken: with `checked`, an item
also carries its number and a checksum over all of it, by which a reader knows that it is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.bench.replay.setting import Setting
from echelon.replay.layout import ShardLayout, item_layout

Array = np.ndarray[Any, Any]
POOL_BYTES = 1 << 26  # of ready chunks: more than the caches hold, as what actors bring is fresh
MAX_POOL = 256
LARGEST = 1 << 16  # of the random numbers; a sum of millions of them is exact in float64


def item_fields(setting: Setting, *, checked: bool = False) -> dict[str, tuple[tuple[int, ...], Any]]:
    """The shape and dtype of every field of an item."""
    observation: tuple[tuple[int, ...], Any] = ((setting.observation,), np.float32)
    fields = {"observation": observation, "next_observation": observation, "action": ((), np.int64)}
    fields |= {"reward": ((), np.float32), "discount": ((), np.float32)}
    return fields | ({"number": ((), np.int64), "checksum": ((), np.float64)} if checked else {})


def shard_layout(setting: Setting, *, checked: bool = False) -> ShardLayout:
    return item_layout(item_fields(setting, checked=checked), setting.shard_capacity)


def frame_layout(setting: Setting) -> ShardLayout:
    """Items as `echelon train` stores them for Atari."""
    stack: tuple[tuple[int, ...], Any] = (setting.stack, np.uint8)
    fields = {"observation": stack, "next_observation": stack, "action": ((), np.int64), "version": ((), np.int64)}
    fields |= {"reward": ((), np.float32), "discount": ((), np.float32)}
    return item_layout(fields, setting.capacity, {"observation": "frames", "next_observation": "frames"})


def checksum(fields: Mapping[str, Array]) -> Array:
    """The sum of all numbers of each item, itself left out."""
    parts = [value for name, value in fields.items() if name != "checksum"]
    total: Array = sum(
        (part.reshape(len(part), -1).sum(1, dtype=np.float64) for part in parts), np.zeros(len(parts[0]))
    )
    return total


@dataclass(frozen=True, slots=True)
class Chunk:
    """Items that are inserted together."""

    fields: dict[str, Array]
    priorities: Array


class Pool:
    """Ready chunks, taken in turn."""

    def __init__(self, setting: Setting, size: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        nbytes = size * (8 * setting.observation + 24)
        self.chunks = [self._make(setting, size, rng) for _ in range(max(2, min(MAX_POOL, POOL_BYTES // nbytes)))]
        self.turn = 0

    @staticmethod
    def _make(setting: Setting, size: int, rng: np.random.Generator) -> Chunk:
        fields = {
            name: rng.integers(0, LARGEST, (size, *shape)).astype(dtype)
            for name, (shape, dtype) in item_fields(setting).items()
        }
        return Chunk(fields, rng.random(size) + 1e-3)

    def take(self) -> Chunk:
        self.turn += 1
        return self.chunks[self.turn % len(self.chunks)]
