"""Replay of stacked frames: memory per transition when every frame is stored once, and throughput.

Eight environments of noise produce one new frame per step. Each frame contains its number, so that samples can be
verified. Episodes start with a stack of one frame and black frames. The buffer is written until all frames have been
overwritten once; the memory is the resident memory of this process, including the learner's part.

Shapes: K environments, S frames of a stack.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np

from echelon.bench.harness import Measure, Progress, repeat
from echelon.bench.processes import session_in
from echelon.bench.replay import LEAST_FRAME, ReplaySetting, Result
from echelon.bench.replay_buffers import EchelonBuffer, draw_priorities, frame_layout
from echelon.replay.frames import FrameWriter
from echelon.replay.reader import ShardReader
from echelon.replay.shard import ShardWriter
from echelon.replay.sharded import Replay

Array = np.ndarray[Any, Any]
NUM_ENVS = 8
EPISODE = 500  # steps; the environments' episodes end at different times
NUM_NOISES = 256  # different frames before marking
MARK = LEAST_FRAME  # bytes at the start of a frame: its number in its environment, from 1; black frames have 0


def run(setting: ReplaySetting, progress: Progress) -> Result:
    with session_in(setting.shm_dir) as session:
        layout, before = frame_layout(setting), resident_bytes()
        reader = ShardReader.at(session, 0, layout)
        buffer = EchelonBuffer(setting, [reader])
        replay = buffer.replay
        inserts = _fill(setting, ShardWriter(reader.shard), replay, progress)
        after = resident_bytes()
        samples, num_wrong = _draw(setting, buffer)
    num_bytes = (after - before) / replay.size
    measures = (
        Measure.of("insert", "items/s", {"echelon": inserts}),
        Measure.of("sample+update", "items/s", {"echelon": samples}),
        Measure.of("memory per transition", "bytes", {"echelon": [num_bytes]}),
    )
    facts = {
        "num_transitions": replay.size,
        "frames_per_transition": round(num_bytes / setting.frame_bytes, 4),
        "frames_per_unshared_transition": 2 * setting.stack[0],
        "replay_resident_gb": round((after - before) / 1e9, 4),
        "process_resident_gb": round(after / 1e9, 4),
        "num_checked": setting.rounds * setting.batch,
        "num_torn": num_wrong,
    }
    return Result(measures, facts)


def resident_bytes() -> int:
    """Returns the resident memory of this process, including the shared memory it has touched."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))


class Environments:
    """K environments of noise, with stacks (K, S, height, width)."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        rng = np.random.default_rng(0)
        self.noise = rng.integers(0, 256, (NUM_NOISES, *shape[1:]), np.uint8)
        self.stacks = np.zeros((NUM_ENVS, *shape), np.uint8)
        self.age = np.arange(NUM_ENVS) * (EPISODE // NUM_ENVS)  # steps since the start of each episode
        self.num_steps = 0
        self._push()

    def step(self) -> Array:
        """Steps all environments; returns which of them made a step (K,): the others were reset."""
        ended = self.age >= EPISODE
        self.stacks[ended] = 0
        self.stacks[:, :-1] = self.stacks[:, 1:]
        self._push()
        self.age += 1
        self.age[ended] = 0
        return ~ended

    def _push(self) -> None:
        self.num_steps += 1
        newest = self.stacks[:, -1]
        newest[...] = self.noise[(np.arange(NUM_ENVS) * 31 + self.num_steps) % NUM_NOISES]
        newest.reshape(NUM_ENVS, -1)[:, :MARK] = np.frombuffer(np.int64(self.num_steps).tobytes(), np.uint8)


def _fill(setting: ReplaySetting, writer: ShardWriter, replay: Replay, progress: Progress) -> list[float]:
    """Steps environments until every place for a frame was overwritten; returns the items per second of every round.

    The time to generate frames is excluded.
    """
    environments, frames = Environments(setting.stack), FrameWriter(writer, "frames", NUM_ENVS)
    numbers, rates = frames.store(environments.stacks), list[float]()
    total = writer.layout.rings[0].capacity  # a transition has at least one new frame
    goals = np.linspace(0, total, setting.rounds + 1).astype(int).tolist()
    for goal in goals[1:]:
        first, elapsed_s = writer.head, 0.0
        while writer.head < goal:
            stepped = environments.step()
            start = time.perf_counter()
            before, numbers = numbers, frames.store(environments.stacks)
            _append(writer, before[stepped], numbers[stepped])
            replay.advance()
            elapsed_s += time.perf_counter() - start
            progress(min(writer.head, total), total)
        rates.append((writer.head - first) / elapsed_s)
    return rates


def _append(writer: ShardWriter, observation: Array, next_observation: Array) -> None:
    count = len(observation)
    fields = {
        "observation": observation,
        "next_observation": next_observation,
        "action": np.zeros(count, np.int64),
        "version": np.zeros(count, np.int64),
        "reward": np.zeros(count, np.float32),
        "discount": np.ones(count, np.float32),
    }
    writer.append(fields, np.ones(count))


def _draw(setting: ReplaySetting, buffer: EchelonBuffer) -> tuple[list[float], int]:
    """Samples and updates batches; returns the items per second of every round, and the number of wrong items."""
    priorities, rates, num_wrong = itertools.cycle(draw_priorities(setting)), list[float](), 0
    for _ in range(setting.rounds):
        done = repeat(lambda: buffer.update(buffer.sample(), next(priorities)), setting.turn_s)
        rates.append(done.count * setting.batch / done.wall_s)
        assert buffer.drawn is not None
        fields = buffer.drawn.fields
        num_wrong += int(np.count_nonzero(~is_whole(fields["observation"], fields["next_observation"])))
    return rates, num_wrong


def is_whole(observation: Array, next_observation: Array) -> Array:
    """Returns whether both stacks of each item have consecutive frames, the second one step after the first."""
    now, later = _marks(observation), _marks(next_observation)
    newest = now[:, -1:] + np.arange(1 - now.shape[1], 1)
    whole: Array = ((now == newest) | (now == 0)).all(1) & (later[:, :-1] == now[:, 1:]).all(1)
    whole &= (later[:, -1] == now[:, -1] + 1) & (now[:, -1] > 0)
    return whole


def _marks(stacks: Array) -> Array:
    """Returns the number in every frame (n, S)."""
    head = np.ascontiguousarray(stacks.reshape(*stacks.shape[:2], -1)[:, :, :MARK])
    marks: Array = head.view(np.int64)[:, :, 0]
    return marks
