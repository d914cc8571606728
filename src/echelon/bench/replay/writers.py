"""Replay that other processes write: the bench draws from all their shards, gives new priorities, and checks each item.

What a batch costs the learner is taken as processor time, which the writers' hunger for cores does not change much, and
by the clock. Checking a batch is not part of it. The peer is measured after ours: two sets of writers would take each
other's cores.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from echelon.bench.exits import check_running
from echelon.bench.replay.buffers import BETA, with_peer
from echelon.bench.replay.items import checksum, shard_layout
from echelon.bench.replay.setting import Measure, Progress, Result, Setting
from echelon.engines.local import LocalEngine
from echelon.engines.process import ProcessSpec
from echelon.errors import RunError
from echelon.replay.reader import ShardReader
from echelon.replay.sampled import Sampled
from echelon.replay.sharded import Replay
from echelon.transport.segments import check_platform
from echelon.transport.session import create_session

Array = np.ndarray[Any, Any]
LOOK_INTERVAL_S = 0.05
START_TIMEOUT_S = 60.0  # without one item more
NUM_PRIORITIES = 16
INSERT, CLOCK, PROCESSOR = "insert by the writers", "sample+update", "sample+update per processor-second"


class Learning(Protocol):
    """The learner's side of a buffer that others write."""

    name: str

    @property
    def num_inserted(self) -> int: ...

    def learn(self, priorities: Array) -> None:
        """Draws a batch and gives it `priorities`; this is timed."""

    def look(self) -> None:
        """Looks whether the batch is whole; this is not timed."""


def run(setting: Setting, progress: Progress) -> Result:
    rounds, facts = _measure_ours(setting, progress)
    by = {"echelon": rounds}
    if with_peer(setting):
        from echelon.bench.replay.peer_writers import measure_peer

        by |= measure_peer(setting, progress)
    measures = (
        Measure.of(name, "items/s", {who: each[name] for who, each in by.items()})
        for name in (INSERT, CLOCK, PROCESSOR)
    )
    return Result(tuple(measures), facts)


def measure_rounds(setting: Setting, learning: Learning, progress: Progress) -> dict[str, list[float]]:
    """Rates of every round: inserted, and drawn by the clock and by processor time."""
    rng = np.random.default_rng(1)
    priorities = [rng.random(setting.batch) + 1e-3 for _ in range(NUM_PRIORITIES)]
    rates: dict[str, list[float]] = {INSERT: [], CLOCK: [], PROCESSOR: []}
    for number in range(setting.rounds + 1):
        progress(number, setting.rounds + 1)
        count, clock_s, processor_s = 0, 0.0, 0.0
        start, before = time.perf_counter(), learning.num_inserted
        while not count or time.perf_counter() - start < setting.turn_s:
            clock, processor = time.perf_counter(), time.process_time()
            learning.learn(priorities[count % NUM_PRIORITIES])
            processor_s += time.process_time() - processor
            clock_s += time.perf_counter() - clock
            learning.look()
            count += 1
        elapsed_s = time.perf_counter() - start
        if number:  # the first round warms up
            rates[INSERT].append((learning.num_inserted - before) / elapsed_s)
            rates[CLOCK].append(count * setting.batch / clock_s)
            rates[PROCESSOR].append(count * setting.batch / processor_s)
    return rates


def wait_filled(size: Callable[[], int], total: int, check: Callable[[], None], progress: Progress) -> None:
    """Waits until the writers have brought `size` to `total`; `check` raises once one of them has left."""
    deadline, before = time.monotonic() + START_TIMEOUT_S, 0
    while (count := size()) < total:
        progress(count, total)
        check()
        if count > before:
            deadline, before = time.monotonic() + START_TIMEOUT_S, count
        elif time.monotonic() > deadline:
            raise RunError(
                f"the writers appended nothing for {START_TIMEOUT_S:.0f} s: {count} of {total} items are there."
            )
        time.sleep(LOOK_INTERVAL_S)


def _measure_ours(setting: Setting, progress: Progress) -> tuple[dict[str, list[float]], dict[str, int | float]]:
    check_platform()
    session = create_session(setting.shm_dir)
    try:
        layout = shard_layout(setting, checked=True)
        readers = [ShardReader.at(session, index, layout) for index in range(setting.num_shards)]
        engine = LocalEngine(str(session), preload=("echelon.bench.replay.writer",))
        try:
            _start(setting, session, engine)
            capacity = setting.shard_capacity
            wait_filled(
                lambda: sum(min(reader.shard.head, capacity) for reader in readers),
                capacity * setting.num_shards,
                lambda: check_running(engine),
                progress,
            )
            learning = ReplayLearning(setting, Replay(readers, setting.alpha))
            rounds = measure_rounds(setting, learning, progress)
            check_running(engine)
        finally:
            engine.close(0.0)
    finally:
        shutil.rmtree(session, ignore_errors=True)
    return rounds, {"num_checked": learning.num_checked, "num_torn": learning.num_torn}


def _start(setting: Setting, session: Path, engine: LocalEngine) -> None:
    for index in range(setting.writers):
        config = {"setting": dataclasses.asdict(setting), "session": str(session), "index": index}
        log = str(session / f"writer-{index}.log")
        engine.start(ProcessSpec(f"writer-{index}", "echelon.bench.replay.writer:Writer", config, log=log))


class ReplayLearning:
    """Ours: what the learner takes in, draws and gives back, and what it found torn."""

    name = "echelon"

    def __init__(self, setting: Setting, replay: Replay) -> None:
        self.replay, self.batch, self.block = replay, setting.batch, replay.layout.block(setting.batch)
        self.rng = np.random.default_rng(0)
        self.drawn: Sampled | None = None
        self.num_checked = self.num_torn = 0

    @property
    def num_inserted(self) -> int:
        return sum(reader.window()[1] for reader in self.replay.readers)

    def learn(self, priorities: Array) -> None:
        self.replay.advance()
        self.drawn = self.replay.sample(self.batch, BETA, self.rng, block=self.block)
        self.replay.update(self.drawn.keys, priorities)

    def look(self) -> None:
        assert self.drawn is not None
        fields, number = self.drawn.fields, self.drawn.keys.number
        whole = (fields["number"] == number) & (fields["checksum"] == checksum(fields))
        self.num_checked += len(whole)
        self.num_torn += int(np.count_nonzero(~whole))
