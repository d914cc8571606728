"""Replay in one process: inserts, draws and new priorities of full buffers, each by itself and together.

Buffers take turns within every round, and so do the operations, so that whatever slows the machine down for a while
slows all of them down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from echelon.bench.replay.buffers import Buffer, make_buffers
from echelon.bench.replay.items import Pool
from echelon.bench.replay.setting import Measure, Progress, Result, Setting

Array = np.ndarray[Any, Any]
Work = Callable[[], object]
FILL = 4096  # items of one insert while the buffers are filled
NUM_DRAWS = 16  # batches whose priorities are written while updates alone are measured
OPERATIONS = ("insert", "sample", "update", "sample+update", "mixed")


def run(setting: Setting, progress: Progress) -> Result:
    buffers = make_buffers(setting)
    turns = [Turns(setting, buffer) for buffer in buffers]
    total = setting.rounds + 1
    rates: dict[str, dict[str, list[float]]] = {name: {b.name: [] for b in buffers} for name in OPERATIONS}
    for number in range(total):
        progress(number, total)
        for name in OPERATIONS:
            for turn in turns if number % 2 else turns[::-1]:
                rate = turn.measure(name, setting.turn_s)
                if number:  # the first round warms up
                    rates[name][turn.buffer.name].append(rate)
    progress(total, total)
    return Result(tuple(Measure.of(name, "items/s", rounds) for name, rounds in rates.items()))


class Turns:
    """The operations of one buffer, which is filled first."""

    def __init__(self, setting: Setting, buffer: Buffer) -> None:
        self.buffer, self.batch, self.chunk = buffer, setting.batch, setting.chunk
        size = min(FILL, setting.shard_capacity)
        pool = Pool(setting, size)
        for _ in range(-(-setting.shard_capacity // size) * setting.num_shards):
            buffer.insert(pool.take())
        self.pool = Pool(setting, setting.chunk)
        rng = np.random.default_rng(1)
        self.priorities = [rng.random(setting.batch) + 1e-3 for _ in range(NUM_DRAWS)]
        self.drawn: list[Any] = []
        self.turn = 0

    def measure(self, name: str, seconds: float) -> float:
        """Items per second of one operation: those inserted, drawn or given a priority; for `mixed`, those drawn."""
        if name == "update":
            self.drawn = [self.buffer.sample() for _ in range(NUM_DRAWS)]
        works: dict[str, Work] = {
            "insert": self._insert,
            "sample": self.buffer.sample,
            "update": self._update,
            "sample+update": self._sample_and_update,
            "mixed": self._mixed,
        }
        work, count, elapsed_s = works[name], 0, 0.0
        start = time.perf_counter()
        while not count or elapsed_s < seconds:  # once at least, however busy the machine is
            work()
            count += 1
            elapsed_s = time.perf_counter() - start
        return count * (self.chunk if name == "insert" else self.batch) / elapsed_s

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
        """One chunk comes in for every batch that goes out."""
        self._insert()
        self._sample_and_update()
