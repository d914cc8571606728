"""A writer: stands for an actor that only appends. It fills its shard, and then appends at its rate.

It waits for nobody but the clock, and catches up if it was kept from running. If the bench dies, the fork server ends
it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from echelon.bench.replay.items import Chunk, Pool, checksum, shard_layout
from echelon.bench.replay.setting import Setting
from echelon.replay.shard import Shard, ShardWriter


class Pace:
    """When chunks are due."""

    def __init__(self, setting: Setting) -> None:
        self.interval_s = setting.chunk / setting.rate
        self.due_s = 0.0

    def wait(self, timeout_s: float) -> bool:
        """Whether a chunk is due; sleeps until then, at most `timeout_s`, if it is not."""
        now = time.monotonic()
        self.due_s = self.due_s or now
        if self.due_s > now:
            time.sleep(min(timeout_s, self.due_s - now))
            return False
        self.due_s += self.interval_s
        return True


class Writer:
    """The role: a step is one chunk."""

    def __init__(self, config: dict[str, Any]) -> None:
        setting, index = Setting(**config["setting"]), int(config["index"])
        layout = shard_layout(setting, checked=True)
        self.writer = ShardWriter(Shard.at(Path(config["session"]), index, layout))
        self.pool = Pool(setting, setting.chunk, seed=index)
        self.capacity, self.pace = layout.capacity, Pace(setting)
        self.finished = False

    def step(self, timeout_s: float) -> bool:
        if self.writer.head >= self.capacity and not self.pace.wait(timeout_s):
            return False
        self._append(self.pool.take())
        return True

    def _append(self, chunk: Chunk) -> None:
        fields = chunk.fields | {"number": self.writer.head + np.arange(len(chunk.priorities))}
        self.writer.append(fields | {"checksum": checksum(fields)}, chunk.priorities)

    def close(self) -> None:
        """Segments go with the session."""
