"""Replay with writer processes: the benchmark samples from all their shards, updates priorities and verifies each item.

The cost of a batch is measured as processor time, which the writers' use of cores affects little, and as wall time.
Verifying a batch is excluded. cpprb is measured after Echelon, with as many writers at the same rate: two sets of
writers would compete for cores.

A writer simulates an actor that only appends. It fills its shard, and then appends at its rate. It waits only for the
clock, and catches up after a delay. If the benchmark dies, the fork server ends it.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.bench.harness import Measure, Progress
from echelon.bench.processes import Processes, session_in
from echelon.bench.replay import ReplaySetting, Result
from echelon.bench.replay_buffers import (
    NUM_DRAWS,
    Buffer,
    Chunk,
    CpprbBuffer,
    EchelonBuffer,
    Pool,
    checksum,
    draw_priorities,
    shard_layout,
)
from echelon.errors import RunError
from echelon.replay.reader import ShardReader
from echelon.replay.shard import Shard, ShardWriter

Array = np.ndarray[Any, Any]
LOOK_INTERVAL_S = 0.05
START_TIMEOUT_S = 60.0  # without a new item
STEP_TIMEOUT_S = 0.1
INSERT, CLOCK, PROCESSOR = "insert by the writers", "sample+update", "sample+update per processor-second"


def run(setting: ReplaySetting, progress: Progress) -> Result:
    layout = shard_layout(setting, checked=True)
    with session_in(setting.shm_dir) as session, Processes(session, preload=(__name__,)) as processes:
        readers = [ShardReader.at(session, index, layout) for index in range(setting.num_shards)]
        start_writers(setting, processes)

        def heads() -> list[int]:
            return [reader.window()[1] for reader in readers]

        wait_filled(setting, heads, processes.check, progress)
        ours = SharedBuffer(setting, readers)
        by = {ours.name: measure_rounds(setting, ours, heads, progress, ours.look)}
        processes.check()
    if setting.has_peer:
        by |= measure_peer(setting, progress)
    measures = (
        Measure.of(name, "items/s", {who: each[name] for who, each in by.items()})
        for name in (INSERT, CLOCK, PROCESSOR)
    )
    return Result(tuple(measures), {"num_checked": ours.num_checked, "num_torn": ours.num_torn})


def start_writers(setting: ReplaySetting, processes: Processes) -> None:
    for index in range(setting.writers):
        config = {"setting": dataclasses.asdict(setting), "index": index}
        processes.start(f"writer-{index}", f"{__name__}:Writer", config)


def wait_filled(
    setting: ReplaySetting, heads: Callable[[], list[int]], check: Callable[[], None], progress: Progress
) -> None:
    """Waits until the writers have filled their parts; `check` raises if one of them has ended."""
    deadline, before, total = time.monotonic() + START_TIMEOUT_S, 0, setting.shard_capacity * setting.writers
    while (count := sum(min(head, setting.shard_capacity) for head in heads())) < total:
        progress(count, total)
        check()
        if count > before:
            deadline, before = time.monotonic() + START_TIMEOUT_S, count
        elif time.monotonic() > deadline:
            raise RunError(f"the writers appended nothing for {START_TIMEOUT_S:.0f} s, after {count} of {total} items.")
        time.sleep(LOOK_INTERVAL_S)


def measure_rounds(
    setting: ReplaySetting,
    buffer: Buffer,
    heads: Callable[[], list[int]],
    progress: Progress,
    look: Callable[[], None] | None = None,
) -> dict[str, list[float]]:
    """Returns the rates of every round: inserts, and samples by wall and processor time; `look` is not timed."""
    priorities = draw_priorities(setting)
    rates: dict[str, list[float]] = {INSERT: [], CLOCK: [], PROCESSOR: []}
    for number in range(setting.rounds + 1):
        progress(number, setting.rounds + 1)
        count, clock_s, processor_s = 0, 0.0, 0.0
        start, before = time.perf_counter(), sum(heads())
        while not count or time.perf_counter() - start < setting.turn_s:
            clock, processor = time.perf_counter(), time.process_time()
            buffer.update(buffer.sample(), priorities[count % NUM_DRAWS])
            processor_s += time.process_time() - processor
            clock_s += time.perf_counter() - clock
            if look is not None:
                look()
            count += 1
        elapsed_s = time.perf_counter() - start
        if number:  # the first round is the warm-up
            rates[INSERT].append((sum(heads()) - before) / elapsed_s)
            rates[CLOCK].append(count * setting.batch / clock_s)
            rates[PROCESSOR].append(count * setting.batch / processor_s)
    return rates


class SharedBuffer(EchelonBuffer):
    """Echelon's replay in shared memory that other processes write; counts torn items."""

    def __init__(self, setting: ReplaySetting, readers: Sequence[ShardReader]) -> None:
        super().__init__(setting, readers)
        self.num_checked = self.num_torn = 0

    def sample(self) -> Any:
        self.replay.advance()
        return super().sample()

    def look(self) -> None:
        """Verifies the checksums of the sampled batch."""
        assert self.drawn is not None
        fields, number = self.drawn.fields, self.drawn.keys.number
        whole = (fields["number"] == number) & (fields["checksum"] == checksum(fields))
        self.num_checked += len(whole)
        self.num_torn += int(np.count_nonzero(~whole))


class Pace:
    """The schedule of a writer's chunks."""

    def __init__(self, setting: ReplaySetting) -> None:
        self.interval_s = setting.chunk / setting.rate
        self.due_s = 0.0

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until a chunk is due, at most `timeout_s`; returns whether one is due."""
        now = time.monotonic()
        self.due_s = self.due_s or now
        if self.due_s > now:
            time.sleep(min(timeout_s, self.due_s - now))
            return False
        self.due_s += self.interval_s
        return True


class Writer:
    """The writer role: a step is one chunk."""

    def __init__(self, config: dict[str, Any]) -> None:
        setting, index = ReplaySetting(**config["setting"]), int(config["index"])
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
        """Does nothing: segments are removed with the session."""


# cpprb's writers receive the buffer as an argument, so multiprocessing must start them. cpprb locks what it reads, so
# items are never torn.


def measure_peer(setting: ReplaySetting, progress: Progress) -> dict[str, dict[str, list[float]]]:
    """Returns the rates of every round, under the peer's name."""
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", setting.writers, lock=False)
    peer = CpprbBuffer(setting, "MPPrioritizedReplayBuffer", ctx=context)
    arguments = [(peer.buffer, counts, dataclasses.asdict(setting), index) for index in range(setting.writers)]
    processes = [context.Process(target=write_peer, args=each, daemon=True) for each in arguments]

    def heads() -> list[int]:
        return list(counts)

    def check() -> None:
        for process in processes:
            if process.exitcode is not None:
                raise RunError(f"a writer of {peer.name} exited with code {process.exitcode}; its message is above.")

    try:
        for process in processes:
            process.start()
        wait_filled(setting, heads, check, progress)
        rounds = measure_rounds(setting, peer, heads, progress)
        check()
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    return {peer.name: rounds}


def write_peer(buffer: Any, counts: Any, setting: dict[str, Any], index: int) -> None:
    """Fills the writer's part of the buffer, and then appends at its rate; ends with the benchmark."""
    asked, parent = ReplaySetting(**setting), os.getppid()
    pool, pace, capacity = Pool(asked, asked.chunk, seed=index), Pace(asked), asked.shard_capacity
    while os.getppid() == parent:
        if counts[index] >= capacity and not pace.wait(STEP_TIMEOUT_S):
            continue
        chunk = pool.take()
        buffer.add(priorities=chunk.priorities, **chunk.fields)
        counts[index] += len(chunk.priorities)
