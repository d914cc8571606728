"""The buffers that are measured: ours, and cpprb's prioritized buffer with the same items beside it."""

from __future__ import annotations

import importlib.metadata
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from echelon.bench.replay.items import Chunk, frame_layout, item_fields, shard_layout
from echelon.bench.replay.setting import Setting
from echelon.errors import ConfigError
from echelon.replay.reader import ShardReader
from echelon.replay.shard import Shard, ShardWriter
from echelon.replay.sharded import Replay
from echelon.room import check_room, free_memory

Array = np.ndarray[Any, Any]
BETA = 0.4
MISSING = (
    "cpprb is not installed, so nothing is measured beside echelon. Install the extra: pip install "
    "'echelon[bench-replay]' (in a checkout: pip install -e '.[bench-replay]'), or pass --peer none."
)


class Buffer(Protocol):
    """What can be measured."""

    name: str

    def insert(self, chunk: Chunk) -> None: ...

    def sample(self) -> Any:
        """Draws a batch; returns the keys of its items."""

    def update(self, keys: Any, priorities: Array) -> None: ...


class EchelonBuffer:
    """Our replay: an insert appends to one shard after the other, and takes it into the learner's tree."""

    name = "echelon"

    def __init__(self, setting: Setting) -> None:
        layout = shard_layout(setting)
        shards = [Shard(layout, name=f"replay shard {index}") for index in range(setting.num_shards)]
        self.writers = [ShardWriter(shard) for shard in shards]
        self.replay = Replay([ShardReader(shard) for shard in shards], setting.alpha)
        self.batch, self.block = setting.batch, layout.block(setting.batch)  # used again, as the learner does
        self.rng = np.random.default_rng(0)
        self.turn = 0

    def insert(self, chunk: Chunk) -> None:
        self.turn += 1
        self.writers[self.turn % len(self.writers)].append(chunk.fields, chunk.priorities)
        self.replay.advance()

    def sample(self) -> Any:
        return self.replay.sample(self.batch, BETA, self.rng, block=self.block).keys

    def update(self, keys: Any, priorities: Array) -> None:
        self.replay.update(keys, priorities)


class CpprbBuffer:
    """cpprb's PrioritizedReplayBuffer."""

    def __init__(self, setting: Setting) -> None:
        self.name, self.batch = self.title(), setting.batch
        self.buffer = self.make(setting, "PrioritizedReplayBuffer")

    @staticmethod
    def title() -> str:
        return f"cpprb {importlib.metadata.version('cpprb')}"

    @staticmethod
    def make(setting: Setting, kind: str, **options: Any) -> Any:
        """A buffer of cpprb's class `kind`, for the same items as ours."""
        env = {name: {"shape": shape or 1, "dtype": dtype} for name, (shape, dtype) in item_fields(setting).items()}
        return getattr(import_module("cpprb"), kind)(setting.capacity, env, alpha=setting.alpha, **options)

    @staticmethod
    def size(setting: Setting) -> int:
        """About the bytes that it takes: the items, and two trees of float64 over the next power of two."""
        return setting.capacity * shard_layout(setting).row.itemsize + 32 * (1 << (setting.capacity - 1).bit_length())

    def insert(self, chunk: Chunk) -> None:
        self.buffer.add(priorities=chunk.priorities, **chunk.fields)

    def sample(self) -> Any:
        return self.buffer.sample(self.batch, BETA)["indexes"]

    def update(self, keys: Any, priorities: Array) -> None:
        self.buffer.update_priorities(keys, priorities)


def has_peer() -> bool:
    return find_spec("cpprb") is not None


def with_peer(setting: Setting) -> bool:
    """Whether the peer is measured too."""
    return setting.mode != "frames" and setting.peer == "cpprb" and has_peer()


def make_buffers(setting: Setting) -> list[Buffer]:
    """Ours, and the peer where it is asked for and there."""
    buffers: list[Buffer] = [EchelonBuffer(setting)]
    return [*buffers, CpprbBuffer(setting)] if with_peer(setting) else buffers


def check_memory(setting: Setting) -> None:
    """Raises ConfigError unless the buffers of `setting` fit into memory; nothing is allocated."""
    is_frames, is_shared = setting.mode == "frames", setting.mode != "process"
    layout = frame_layout(setting) if is_frames else shard_layout(setting, checked=is_shared)
    nbytes = Replay.size_of(layout, setting.num_shards) + (CpprbBuffer.size(setting) if with_peer(setting) else 0)
    folder = Path(setting.shm_dir) if is_shared else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"shm_dir={folder} is not a folder. Name one in shared memory with --shm-dir.")
    what = f"--frames {setting.frames}" if is_frames else f"--observation {setting.observation}"
    check_room(nbytes, f"replay of --capacity {setting.capacity} with {what}", free_memory(folder), "--capacity")
