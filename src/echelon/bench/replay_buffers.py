"""The buffers of `echelon bench replay`, Echelon's and cpprb's, with equal items; and the single-process benchmark.

Items are transitions of random numbers, prepared before the measurement. All numbers are integers, so that sums over an
item are exact in any order: with `checked`, an item also has its number and a checksum, by which a reader verifies it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from echelon.bench.harness import Measure, Progress, in_turns, repeat
from echelon.bench.replay import ReplaySetting, Result
from echelon.replay.layout import ShardLayout, item_layout
from echelon.replay.reader import ShardReader
from echelon.replay.sampled import Sampled
from echelon.replay.shard import Shard, ShardWriter
from echelon.replay.sharded import Replay

Array = np.ndarray[Any, Any]
POOL_BYTES = 1 << 26  # of prepared chunks: more than the caches hold, as actors' data is not cached
MAX_POOL = 256
LARGEST = 1 << 16  # bound of the random numbers; a sum of millions of them is exact in float64
BETA = 0.4
FILL = 4096  # items per insert while the buffers are filled
NUM_DRAWS = 16  # batches whose priorities are updated while `update` alone is measured
OPERATIONS = ("insert", "sample", "update", "sample+update", "mixed")


def item_fields(setting: ReplaySetting, *, checked: bool = False) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Returns the shape and dtype of every field of an item."""
    observation: tuple[tuple[int, ...], Any] = ((setting.observation,), np.float32)
    fields = {"observation": observation, "next_observation": observation, "action": ((), np.int64)}
    fields |= {"reward": ((), np.float32), "discount": ((), np.float32)}
    return fields | ({"number": ((), np.int64), "checksum": ((), np.float64)} if checked else {})


def shard_layout(setting: ReplaySetting, *, checked: bool = False) -> ShardLayout:
    return item_layout(item_fields(setting, checked=checked), setting.shard_capacity)


def frame_layout(setting: ReplaySetting) -> ShardLayout:
    """Returns the layout that `echelon train` uses for Atari."""
    stack: tuple[tuple[int, ...], Any] = (setting.stack, np.uint8)
    fields = {"observation": stack, "next_observation": stack, "action": ((), np.int64), "version": ((), np.int64)}
    fields |= {"reward": ((), np.float32), "discount": ((), np.float32)}
    return item_layout(fields, setting.capacity, {"observation": "frames", "next_observation": "frames"})


def checksum(fields: Mapping[str, Array]) -> Array:
    """Returns the sum of all numbers of each item, except the checksum itself."""
    parts = [value for name, value in fields.items() if name != "checksum"]
    total: Array = sum(
        (part.reshape(len(part), -1).sum(1, dtype=np.float64) for part in parts), np.zeros(len(parts[0]))
    )
    return total


@dataclass(frozen=True, slots=True)
class Chunk:
    """Items of one insert."""

    fields: dict[str, Array]
    priorities: Array


class Pool:
    """Prepared chunks, used in rotation."""

    def __init__(self, setting: ReplaySetting, size: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        nbytes = size * (8 * setting.observation + 24)
        self.chunks = [self._make(setting, size, rng) for _ in range(max(2, min(MAX_POOL, POOL_BYTES // nbytes)))]
        self.turn = 0

    @staticmethod
    def _make(setting: ReplaySetting, size: int, rng: np.random.Generator) -> Chunk:
        fields = {
            name: rng.integers(0, LARGEST, (size, *shape)).astype(dtype)
            for name, (shape, dtype) in item_fields(setting).items()
        }
        return Chunk(fields, rng.random(size) + 1e-3)

    def take(self) -> Chunk:
        self.turn += 1
        return self.chunks[self.turn % len(self.chunks)]


def draw_priorities(setting: ReplaySetting) -> list[Array]:
    """Returns new priorities for a few batches, used in rotation."""
    rng = np.random.default_rng(1)
    return [rng.random(setting.batch) + 1e-3 for _ in range(NUM_DRAWS)]


class Buffer(Protocol):
    """The interface of a measured buffer."""

    name: str

    def insert(self, chunk: Chunk) -> None: ...

    def sample(self) -> Any:
        """Samples a batch; returns the keys of its items."""

    def update(self, keys: Any, priorities: Array) -> None: ...


class EchelonBuffer:
    """Echelon's replay: an insert appends to the shards in rotation and updates the learner's sum tree."""

    name = "echelon"

    def __init__(
        self, setting: ReplaySetting, readers: Sequence[ShardReader], writers: Sequence[ShardWriter] = ()
    ) -> None:
        self.writers, self.replay = writers, Replay(list(readers), setting.alpha)
        self.batch, self.block = setting.batch, self.replay.layout.block(setting.batch)  # reused, as by the learner
        self.rng = np.random.default_rng(0)
        self.turn = 0
        self.drawn: Sampled | None = None

    @classmethod
    def alone(cls, setting: ReplaySetting) -> EchelonBuffer:
        """Returns a buffer in the memory of this process."""
        layout = shard_layout(setting)
        shards = [Shard(layout, name=f"replay shard {index}") for index in range(setting.num_shards)]
        return cls(setting, [ShardReader(shard) for shard in shards], [ShardWriter(shard) for shard in shards])

    def insert(self, chunk: Chunk) -> None:
        self.turn += 1
        self.writers[self.turn % len(self.writers)].append(chunk.fields, chunk.priorities)
        self.replay.advance()

    def sample(self) -> Any:
        self.drawn = self.replay.sample(self.batch, BETA, self.rng, block=self.block)
        return self.drawn.keys

    def update(self, keys: Any, priorities: Array) -> None:
        self.replay.update(keys, priorities)


class CpprbBuffer:
    """A prioritized buffer of cpprb, with the same items."""

    def __init__(self, setting: ReplaySetting, kind: str = "PrioritizedReplayBuffer", **options: Any) -> None:
        self.name, self.batch = f"cpprb {importlib.metadata.version('cpprb')}", setting.batch
        env = {name: {"shape": shape or 1, "dtype": dtype} for name, (shape, dtype) in item_fields(setting).items()}
        make = getattr(import_module("cpprb"), kind)
        self.buffer = make(setting.capacity, env, alpha=setting.alpha, **options)

    @staticmethod
    def size(setting: ReplaySetting) -> int:
        """Returns its approximate size in bytes: the items, and two float64 trees over the next power of two."""
        return setting.capacity * shard_layout(setting).row.itemsize + 32 * (1 << (setting.capacity - 1).bit_length())

    def insert(self, chunk: Chunk) -> None:
        self.buffer.add(priorities=chunk.priorities, **chunk.fields)

    def sample(self) -> Any:
        return self.buffer.sample(self.batch, BETA)["indexes"]

    def update(self, keys: Any, priorities: Array) -> None:
        self.buffer.update_priorities(keys, priorities)


class Turns:
    """The operations of one buffer; the constructor fills it."""

    def __init__(self, setting: ReplaySetting, buffer: Buffer) -> None:
        self.buffer, self.batch, self.chunk = buffer, setting.batch, setting.chunk
        size = min(FILL, setting.shard_capacity)
        pool = Pool(setting, size)
        for _ in range(-(-setting.shard_capacity // size) * setting.num_shards):
            buffer.insert(pool.take())
        self.pool, self.priorities = Pool(setting, setting.chunk), draw_priorities(setting)
        self.drawn: list[Any] = []
        self.turn = 0
        self.works: dict[str, Callable[[], object]] = {
            "insert": self._insert,
            "sample": buffer.sample,
            "update": self._update,
            "sample+update": self._sample_and_update,
            "mixed": self._mixed,
        }

    def measure(self, name: str, seconds: float) -> float:
        """Returns the items per second of one operation: inserted, sampled or updated; for `mixed`, sampled."""
        if name == "update":
            self.drawn = [self.buffer.sample() for _ in range(NUM_DRAWS)]
        done = repeat(self.works[name], seconds)
        return done.count * (self.chunk if name == "insert" else self.batch) / done.wall_s

    def _insert(self) -> None:
        self.buffer.insert(self.pool.take())

    def _next(self) -> int:
        self.turn += 1
        return self.turn % NUM_DRAWS

    def _update(self) -> None:
        turn = self._next()
        self.buffer.update(self.drawn[turn], self.priorities[turn])

    def _sample_and_update(self) -> None:
        self.buffer.update(self.buffer.sample(), self.priorities[self._next()])

    def _mixed(self) -> None:
        """Inserts one chunk and samples and updates one batch."""
        self._insert()
        self._sample_and_update()


def run(setting: ReplaySetting, progress: Progress) -> Result:
    """Measures insert, sample and update of full buffers in one process, separately and together."""
    buffers: list[Buffer] = [EchelonBuffer.alone(setting)]
    if setting.has_peer:
        buffers.append(CpprbBuffer(setting))
    filled = [Turns(setting, buffer) for buffer in buffers]
    works = [
        (name, turns) for name in OPERATIONS for turns in filled
    ]  # adjacent in time, so that the buffers can be compared
    rates: dict[str, dict[str, list[float]]] = {name: {b.name: [] for b in buffers} for name in OPERATIONS}
    total = setting.rounds + 1
    for number, (name, turns) in in_turns(works, total):
        progress(number, total)
        rate = turns.measure(name, setting.turn_s)
        if number:  # the first round is the warm-up
            rates[name][turns.buffer.name].append(rate)
    progress(total, total)
    return Result(tuple(Measure.of(name, "items/s", rounds) for name, rounds in rates.items()))
