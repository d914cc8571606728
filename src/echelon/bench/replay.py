"""`echelon bench replay`: throughput of inserts, samples and priority updates of the replay, and its memory.

Imports only numpy: the memory of torch would count as the replay's.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from echelon.bench.harness import (
    Benchmark,
    Measure,
    Progress,
    Runs,
    Setting,
    Sweep,
    amount,
    fact_table,
    machine,
    measure_table,
    option,
)
from echelon.errors import ConfigError

PEERS = ("cpprb", "none")
LEAST_FRAME = 8  # bytes
MODES = {  # the module whose `run` measures, and the unit of its progress
    "process": ("echelon.bench.replay_buffers", "rounds"),
    "writers": ("echelon.bench.replay_writers", "items, then rounds"),
    "frames": ("echelon.bench.replay_frames", "transitions"),
}
FACTS = {
    "num_transitions": "transitions",
    "frames_per_transition": "memory per transition, in frames",
    "frames_per_unshared_transition": "the same with whole stacks",
    "replay_resident_gb": "resident memory of the replay, GB",
    "process_resident_gb": "resident memory of the process, GB",
    "num_checked": "items checked",
    "num_torn": "items torn",
}
SHOWN = {  # the settings that apply in each mode
    "process": ("capacity", "batch", "chunk", "observation", "shards", "alpha"),
    "writers": ("writers", "rate", "capacity", "batch", "chunk", "observation", "alpha"),
    "frames": ("frames", "capacity", "batch", "alpha"),
}
MISSING = (
    "cpprb is not installed, so there is no peer to compare with. Install the extra: pip install "
    "'echelon[bench-replay]' (in a checkout: pip install -e '.[bench-replay]'), or pass --peer none."
)


@dataclass(frozen=True, slots=True)
class ReplaySetting(Setting):
    """One run: in one process, with `writers` in separate processes, or with `frames`."""

    batch: int = option(512, "items per sample", least=1)
    capacity: int = option(1 << 20, "items over all shards")
    chunk: int = option(64, "items per insert", least=1)
    observation: int = option(
        8, "float32 numbers per observation; an item has two, an action, a reward and a discount", least=1
    )
    shards: int = option(0, "number of shards; 0: one, or one per writer", least=0)
    writers: int = option(0, "writer processes, each with its own shard; 0: everything in one process", least=0)
    rate: float = option(25_000.0, "items per second of each writer", above=0)
    frames: str = option("", "height x width x stack of uint8 images, in place of floats")
    alpha: float = option(0.6, "priority exponent")
    seconds: float = option(2.0, "duration of each measurement: one operation of one buffer", above=0)
    rounds: int = option(
        20, "rounds of a measurement; buffers and operations alternate, and medians are reported", least=1
    )
    peer: str = option("cpprb", f"library to compare with: {', '.join(PEERS)}", choices=PEERS)
    shm_dir: str = option("/dev/shm", "directory of the shared-memory files")

    def check(self) -> None:
        if not 0.0 < self.alpha <= 1.0:
            raise ConfigError(f"alpha={self.alpha} must be above 0 and at most 1: the benchmark samples by priority.")
        if self.frames and not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", self.frames):
            raise ConfigError(
                f"frames={self.frames!r} is not height x width x stack. Write, for example, --frames 84x84x4."
            )
        if self.frames and self.frame_bytes < LEAST_FRAME:
            raise ConfigError(
                f"frames={self.frames} has fewer than {LEAST_FRAME} pixels, which store the frame's number."
            )
        if self.writers and self.shards not in (0, self.writers):
            raise ConfigError(
                f"shards={self.shards} and writers={self.writers}: every writer has its own shard. Omit --shards, or "
                "set it to the number of writers."
            )
        if self.frames and (self.writers or self.shards > 1):
            raise ConfigError(
                f"frames={self.frames} is measured in one process with one shard, not with writers={self.writers} and "
                f"shards={self.shards}. Omit those options."
            )
        if self.shard_capacity < max(self.batch, self.chunk):
            raise ConfigError(
                f"capacity={self.capacity} gives each of {self.num_shards} shards {self.shard_capacity} items, but a "
                f"shard must hold a batch of {self.batch} and a chunk of {self.chunk}. Raise --capacity."
            )

    @property
    def mode(self) -> str:
        return "frames" if self.frames else "writers" if self.writers else "process"

    @property
    def has_peer(self) -> bool:
        """Whether the peer is measured, too."""
        return self.mode != "frames" and self.peer == "cpprb" and find_spec("cpprb") is not None

    @property
    def num_shards(self) -> int:
        return self.shards or max(1, self.writers)

    @property
    def shard_capacity(self) -> int:
        return self.capacity // self.num_shards

    @property
    def stack(self) -> tuple[int, int, int]:
        """The shape of an observation of frames: stack, height, width."""
        height, width, depth = (int(size) for size in self.frames.split("x"))
        return depth, height, width

    @property
    def frame_bytes(self) -> int:
        """The size of a frame: one byte per pixel."""
        return math.prod(self.stack[1:])

    @property
    def turn_s(self) -> float:
        """The duration of one operation of one buffer in one round."""
        return self.seconds / self.rounds


@dataclass(frozen=True, slots=True)
class Result:
    """The results of one run."""

    measures: tuple[Measure, ...]
    facts: Mapping[str, int | float] = field(default_factory=dict)  # figures that are counted once


class ReplayBenchmark(Benchmark[ReplaySetting, Result]):
    """A sweep over any arguments: one run for each combination of their values."""

    name = "replay"
    text = """\
Measure prioritized replay with full buffers, and compare it with cpprb if that is installed:
  in one process          insert, sample, update, sample+update, and mixed: one chunk inserted per batch sampled
  --writers 4             the learner's side while 4 processes append to their own shards; items are verified
  --frames 84x84x4        stacked frames, each stored once: resident memory as counted by the kernel
Arguments may be comma-separated lists: one run for each combination. `echelon bench plot` draws the report.
"""
    setting = ReplaySetting
    swept = tuple(name for name in ReplaySetting.options() if name != "shm_dir")

    def prepare(self, settings: Sequence[ReplaySetting]) -> None:
        for setting in settings:
            check_memory(setting)
        if any(setting.mode != "frames" and setting.peer != "none" for setting in settings) and not find_spec("cpprb"):
            print(MISSING, file=sys.stderr)

    def measure(self, setting: ReplaySetting, progress: Progress) -> Result:
        result: Result = import_module(MODES[setting.mode][0]).run(setting, progress)
        return result

    def unit(self, setting: ReplaySetting) -> str:
        return MODES[setting.mode][1]

    def label(self, setting: ReplaySetting) -> str:
        return setting.mode

    def newest(self, runs: Runs[ReplaySetting, Result]) -> str:
        setting, result = runs.newest
        shown = {name: getattr(setting, name) for name in SHOWN[setting.mode]}
        head = ", ".join(f"{name} {amount(value)}" for name, value in shown.items() if value)
        facts = ["", *fact_table(result.facts, FACTS)] if result.facts else []
        table = measure_table(result.measures, "ratio", lambda measure: measure.ratio)
        return "\n".join([f"\n{head}", "", *table, *facts])

    def fault(self, runs: Runs[ReplaySetting, Result]) -> str:
        num_torn = sum(int(result.facts.get("num_torn", 0)) for result in runs.results)
        return f"{num_torn} items were torn: readers read items that were being overwritten." if num_torn else ""

    def is_drawn(self, sweep: Sweep[ReplaySetting]) -> bool:
        return True

    def report(self, runs: Runs[ReplaySetting, Result]) -> dict[str, Any]:
        entries = [
            {"mode": setting.mode, "varied": runs.sweep.values(setting), **dataclasses.asdict(result)}
            for setting, result in runs
        ]
        return {"bench": self.name, "setting": runs.sweep.common, "runs": entries, **machine()}


def check_memory(setting: ReplaySetting) -> None:
    """Raises ConfigError unless the buffers of `setting` fit into memory; allocates nothing."""
    from echelon.bench.replay_buffers import CpprbBuffer, frame_layout, shard_layout
    from echelon.memory_check import check_fits, free_memory
    from echelon.replay.sharded import Replay

    is_frames, is_shared = setting.mode == "frames", setting.mode != "process"
    layout = frame_layout(setting) if is_frames else shard_layout(setting, checked=is_shared)
    nbytes = Replay.size_of(layout, setting.num_shards) + (CpprbBuffer.size(setting) if setting.has_peer else 0)
    folder = Path(setting.shm_dir) if is_shared else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"shm_dir={folder} is not a folder. Choose a folder in shared memory with --shm-dir.")
    what = f"--frames {setting.frames}" if is_frames else f"--observation {setting.observation}"
    check_fits(nbytes, f"replay of --capacity {setting.capacity} with {what}", free_memory(folder), "--capacity")
