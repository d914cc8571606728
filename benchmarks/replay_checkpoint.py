"""Measures how long a learner pauses when checkpoints include the replay.

    python3 benchmarks/replay_checkpoint.py                         # 1,000,000 transitions, 8 checkpoints
    python3 benchmarks/replay_checkpoint.py --items 200000 --rounds 3

A learner of `apex-dqn` (observations of 8 floats) runs in this process, and two other processes write its shards. It
alternates between learning without a checkpoint and learning during one, including `Learner.checkpoint` and its fsync,
until the content of the replay is on disk. Every step is timed; the result is the longest step. `--often` writes
another checkpoint of the weights while the replay is being written, when the disk is busiest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from echelon.config import replace
from echelon.presets import preset
from echelon.replay.shard import ShardWriter
from echelon.roles.context import Context
from echelon.roles.learner import Learner
from echelon.roles.plan.parts import Plan
from echelon.roles.replay_source import ReplaySource
from echelon.schema import Spaces
from echelon.world.node import Node

NUM_WRITERS, CHUNK = 2, 64
SPACES = Spaces(gym.spaces.Box(-1.0, 1.0, (8,), np.float32), gym.spaces.Discrete(4))


def make_context(folder: Path, session: Path, items: int) -> Context:
    changes: dict[str, Any] = {
        "actor.num_actors": NUM_WRITERS,
        "actor.envs": CHUNK,
        "actor.trajectory": 1,
        "replay.n_step": 1,
    }
    changes |= {"replay.capacity": items, "replay.min_size": 1_000, "replay.samples_per_insert": 0.0}
    changes |= {"replay.checkpoint": True, "run.checkpoint_interval_s": 1e9, "stop.minutes": 1e9}
    config = replace(preset("apex-dqn", "CartPole-v1"), **changes)
    return Context(
        name="learner", index=0, incarnation=0, generation=0, train=config, spaces=SPACES, state_shapes=(),
        session=session, address=f"inproc://{session.name}", run_dir=folder, started_at=time.time(),
    )  # fmt: skip


def write(config: dict[str, Any], index: int, rate: float, full: Any, stop: Any) -> None:
    """Runs a writer process: fills its shard, reports it, then appends `rate` items per second."""
    plan = Plan(Context.from_config(config)).replay
    writer, limiter, rng = ShardWriter(plan.shard(index)), plan.limiter(), np.random.default_rng(index)
    fields = {
        f.name: rng.integers(0, 4, (CHUNK, *f.shape)).astype(f.dtype)
        if f.dtype.kind == "i"
        else rng.random((CHUNK, *f.shape)).astype(f.dtype)
        for f in plan.layout.fields
    }
    began = 0.0
    while not stop.is_set():
        writer.append(fields, rng.random(CHUNK) + 0.01)
        limiter.note_inserted(index, writer.head)
        if writer.head < plan.layout.capacity + CHUNK:
            began = time.monotonic()
            continue
        full.set()
        ahead_s = (writer.head - plan.layout.capacity) / rate - (time.monotonic() - began)
        stop.wait(max(0.0, ahead_s))


class Timed:
    """A learner with timed steps."""

    def __init__(self, context: Context, world: Node) -> None:
        self.world, self.learner = world, Learner(context)
        assert isinstance(self.learner.source, ReplaySource) and self.learner.source.archive is not None
        self.archive = self.learner.source.archive
        self.calls: list[float] = []  # wall and processor seconds of `Learner.checkpoint`
        self.processor: list[float] = []

    def step(self, does_checkpoint: bool = False) -> float:
        """Makes one step; returns its seconds."""
        start, spent = time.perf_counter(), time.thread_time()
        if does_checkpoint:
            self.learner.record.checkpoint()
            self.calls.append(time.perf_counter() - start)
            self.processor.append(time.thread_time() - spent)
        self.learner.step(1.0)
        took_s = time.perf_counter() - start
        self.world.poll(0.0)
        return took_s

    def plain(self, seconds: float) -> list[float]:
        end, steps = time.perf_counter() + seconds, []
        while time.perf_counter() < end:
            steps.append(self.step())
        return steps

    def saved(self, is_often: bool) -> tuple[list[float], float]:
        """Returns the steps from a checkpoint until it is on disk, and the seconds until then."""
        start = time.perf_counter()
        steps = [self.step(does_checkpoint=True)]
        while self.archive.is_writing:
            steps.append(self.step(does_checkpoint=is_often and len(steps) % 20 == 0))
        assert not self.archive.error, self.archive.error
        return steps, time.perf_counter() - start


def measure(items: int, rounds: int, rate: float, folder: Path, is_often: bool) -> dict[str, Any]:
    session = Path(tempfile.mkdtemp(prefix="echelon-bench-", dir="/dev/shm"))
    context = make_context(folder, session, items)
    world = Node.host(context.address)
    for name in ("message", "phases", "train", "finished"):
        world.serve(name, lambda *told: None)
    spawn = multiprocessing.get_context("spawn")
    stop, full = spawn.Event(), [spawn.Event() for _ in range(NUM_WRITERS)]
    writers: list[Any] = []
    try:
        Plan(context).make()
        config = context.to_config(keep_objects=False)
        for index in range(NUM_WRITERS):
            arguments = (config, index, rate / NUM_WRITERS, full[index], stop)
            writers.append(spawn.Process(target=write, args=arguments, daemon=True))
            writers[-1].start()
        for event in full:
            if not event.wait(300.0):
                raise RuntimeError("the writers did not fill their shards within 300 s.")
        timed = Timed(context, world)
        timed.plain(1.0)
        without, during, total_s = (list[float]() for _ in range(3))
        for _ in range(rounds):
            without += timed.plain(statistics.median(total_s) if total_s else 0.5)
            steps, took_s = timed.saved(is_often)
            during, total_s = during + steps, [*total_s, took_s]
        newest = next(path for path in timed.archive.folder.iterdir())
        nbytes = sum(path.stat().st_size for path in newest.iterdir())
        timed.learner.close()
    finally:
        stop.set()
        for process in writers:
            process.join()
        world.close()
        shutil.rmtree(session, ignore_errors=True)
    return {
        "items": items,
        "inserts_per_s": rate,
        "bytes": nbytes,
        "checkpoints": rounds,
        "seconds_each": {"median": statistics.median(total_s), "longest": max(total_s)},
        "step_ms_without": told_ms(without),
        "step_ms_during": told_ms(during),
        "checkpoint_ms": told_ms(timed.calls),
        "checkpoint_processor_ms": told_ms(timed.processor),
    }


def told_ms(steps: list[float]) -> dict[str, float]:
    ordered = sorted(1e3 * step for step in steps)
    return {
        "count": len(ordered),
        "median": round(statistics.median(ordered), 2),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 2),
        "longest": round(ordered[-1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rate", type=float, default=10_000.0, help="items per second that the writers append")
    parser.add_argument("--folder", type=Path, default=Path("."), help="folder on the disk to measure")
    parser.add_argument(
        "--often", action="store_true", help="also write checkpoints of the weights during the write of the replay"
    )
    options = parser.parse_args()
    run = Path(tempfile.mkdtemp(prefix="replay-checkpoint-", dir=options.folder))
    try:
        print(json.dumps(measure(options.items, options.rounds, options.rate, run, options.often), indent=2))
    finally:
        shutil.rmtree(run, ignore_errors=True)


if __name__ == "__main__":
    main()
