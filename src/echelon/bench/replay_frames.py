"""Replay of stacked frames: what a transition takes when every frame lies once, and how fast it goes.

Eight environments of noise bring one new frame a step; each frame says where it belongs, so that what is drawn can be
checked. Episodes start with a stack of one frame over black ones. The buffer is written until its frames have all been
overwritten once, and the memory is what the kernel counts as resident for this process, the learner's part included.

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
EPISODE = 500  # steps; the environments end theirs one after the other
NUM_NOISES = 256  # different frames, before they are marked
MARK = LEAST_FRAME  # bytes at the start of a frame: which it is of its environment's, from 1 on; black frames have 0


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
    """What this process holds in memory now, shared memory that it has touched included."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))


class Environments:
    """K environments of noise: their stacks (K, S, height, width)."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        rng = np.random.default_rng(0)
        self.noise = rng.integers(0, 256, (NUM_NOISES, *shape[1:]), np.uint8)
        self.stacks = np.zeros((NUM_ENVS, *shape), np.uint8)
        self.age = np.arange(NUM_ENVS) * (EPISODE // NUM_ENVS)  # of each episode, in steps
        self.num_steps = 0
        self._push()

    def step(self) -> Array:
        """Goes on; returns which environments made a step (K,): the others were set back."""
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
    """Steps environments until no frame is the first in its place; returns the items per second of every round.

    The time in which frames are made is left out.
    """
    environments, frames = Environments(setting.stack), FrameWriter(writer, "frames", NUM_ENVS)
    numbers, rates = frames.store(environments.stacks), list[float]()
    total = writer.layout.rings[0].capacity  # a transition brings at least one frame
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
    """Draws batches and gives new priorities; returns the items per second of every round, and how many were wrong."""
    priorities, rates, num_wrong = itertools.cycle(draw_priorities(setting)), list[float](), 0
    for _ in range(setting.rounds):
        done = repeat(lambda: buffer.update(buffer.sample(), next(priorities)), setting.turn_s)
        rates.append(done.count * setting.batch / done.wall_s)
        assert buffer.drawn is not None
        fields = buffer.drawn.fields
        num_wrong += int(np.count_nonzero(~is_whole(fields["observation"], fields["next_observation"])))
    return rates, num_wrong


def is_whole(observation: Array, next_observation: Array) -> Array:
    """Whether both stacks of each item are of consecutive frames, the second one step after the first."""
    now, later = _marks(observation), _marks(next_observation)
    newest = now[:, -1:] + np.arange(1 - now.shape[1], 1)
    whole: Array = ((now == newest) | (now == 0)).all(1) & (later[:, :-1] == now[:, 1:]).all(1)
    whole &= (later[:, -1] == now[:, -1] + 1) & (now[:, -1] > 0)
    return whole


def _marks(stacks: Array) -> Array:
    """The number in every frame (n, S)."""
    head = np.ascontiguousarray(stacks.reshape(*stacks.shape[:2], -1)[:, :, :MARK])
    marks: Array = head.view(np.int64)[:, :, 0]
    return marks
