"""cpprb's buffer for several processes, written by as many of them as ours, at the same rate.

The writers are handed the buffer, so they are started by multiprocessing, as cpprb wants it. They leave when the bench
does.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from typing import Any

import numpy as np

from echelon.bench.replay.buffers import BETA, CpprbBuffer
from echelon.bench.replay.items import Pool
from echelon.bench.replay.setting import Progress, Setting
from echelon.bench.replay.writer import Pace
from echelon.bench.replay.writers import measure_rounds, wait_filled
from echelon.errors import RunError

Array = np.ndarray[Any, Any]
STEP_TIMEOUT_S = 0.1


def measure_peer(setting: Setting, progress: Progress) -> dict[str, dict[str, list[float]]]:
    """The rates of every round, under the peer's name."""
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", setting.writers, lock=False)
    learning = CpprbLearning(setting, context, counts)
    arguments = [(learning.buffer, counts, dataclasses.asdict(setting), index) for index in range(setting.writers)]
    processes = [context.Process(target=write, args=each, daemon=True) for each in arguments]

    def check() -> None:
        for process in processes:
            if process.exitcode is not None:
                raise RunError(f"a writer of {learning.name} left with code {process.exitcode}; its message is above.")

    try:
        for process in processes:
            process.start()
        capacity = setting.shard_capacity
        wait_filled(lambda: sum(min(count, capacity) for count in counts), capacity * setting.writers, check, progress)
        rounds = measure_rounds(setting, learning, progress)
        check()
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    return {learning.name: rounds}


class CpprbLearning:
    """The learner's side of cpprb's MPPrioritizedReplayBuffer."""

    def __init__(self, setting: Setting, context: Any, counts: Any) -> None:
        self.name, self.counts, self.batch = CpprbBuffer.title(), counts, setting.batch
        self.buffer = CpprbBuffer.make(setting, "MPPrioritizedReplayBuffer", ctx=context)

    @property
    def num_inserted(self) -> int:
        return sum(self.counts)

    def learn(self, priorities: Array) -> None:
        self.buffer.update_priorities(self.buffer.sample(self.batch, BETA)["indexes"], priorities)

    def look(self) -> None:
        """It locks what it reads, so nothing tears."""


def write(buffer: Any, counts: Any, setting: dict[str, Any], index: int) -> None:
    """What a writer does: fills its part of the buffer, and then appends at its rate."""
    asked, parent = Setting(**setting), os.getppid()
    pool, pace, capacity = Pool(asked, asked.chunk, seed=index), Pace(asked), asked.shard_capacity
    while os.getppid() == parent:
        if counts[index] >= capacity and not pace.wait(STEP_TIMEOUT_S):
            continue
        chunk = pool.take()
        buffer.add(priorities=chunk.priorities, **chunk.fields)
        counts[index] += len(chunk.priorities)
