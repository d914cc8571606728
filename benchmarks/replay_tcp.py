"""Compares the samples per second of a learner through a shard server on TCP and directly in shared memory.

Another process serves the shards over the loopback, encrypted with CURVE as always. This process samples batches,
copies them and returns priorities, with 0, 1, 2 and 4 batches in flight, and directly. A learner spends time on a batch
(`--learn-ms`, asleep as if on a GPU, or computing with `--busy`), and prefetching hides the latency behind it. Rounds
of all settings alternate, and medians are reported, so that noise affects all of them.

    python benchmarks/replay_tcp.py                     # 8 floats an observation
    python benchmarks/replay_tcp.py --frames 84x84x4    # stacked images, each frame stored once
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from echelon.bench.watch import cpu_seconds
from echelon.replay.frames import FrameWriter
from echelon.replay.layout import ShardLayout, item_layout
from echelon.replay.limiter import Limiter, LimiterRule
from echelon.replay.reader import PriorityColumn, ShardReader
from echelon.replay.remote import Link
from echelon.replay.sampled import Draft
from echelon.replay.shard import Shard, ShardWriter
from echelon.replay.sharded import Replay
from echelon.replay.wire import ReplayWire
from echelon.servers.shards import ShardServer

AHEAD = (0, 1, 2, 4)


def layout_of(frames: str, capacity: int) -> ShardLayout:
    fields: dict[str, Any] = {"action": ((), np.int64), "reward": ((), np.float32), "discount": ((), np.float32)}
    if not frames:
        return item_layout(fields | {name: ((8,), np.float32) for name in ("seen", "next_seen")}, capacity)
    height, width, stack = (int(size) for size in frames.split("x"))
    fields |= {name: ((stack, height, width), np.uint8) for name in ("seen", "next_seen")}
    return item_layout(fields, capacity, {"seen": "frames", "next_seen": "frames"})


def fill(shard: Shard, rng: np.random.Generator) -> None:
    """Fills a shard with random items."""
    layout, writer, n = shard.layout, ShardWriter(shard), 64
    stacked = next((f for f in layout.fields if f.stack), None)
    frames = FrameWriter(writer, "frames", n) if stacked else None
    stack = np.zeros((n, *stacked.shape), np.uint8) if stacked else np.zeros(0)
    numbers = frames.store(stack) if frames else stack
    while writer.head < layout.capacity:
        items = {f.name: np.zeros((n, *f.in_row[0]), f.in_row[1]) for f in layout.fields}
        if frames:
            stack = np.roll(stack, -1, 1)
            stack[:, -1] = rng.integers(0, 255, stack[:, -1].shape, np.uint8)
            following = frames.store(stack)
            items |= {"seen": numbers, "next_seen": following}
            numbers = following
        writer.append(items, rng.random(n))


def serve(folder: Path, wire: ReplayWire, rule: LimiterRule) -> None:
    server = ShardServer(folder, wire, rule, "tcp://127.0.0.1:0")
    print(server.address, flush=True)
    while os.getppid() != 1:
        server.step(0.1)


class Setting:
    """A replay with `num_ahead` batches in flight."""

    def __init__(self, name: str, replay: Replay, num_ahead: int, arguments: argparse.Namespace) -> None:
        self.name, self.replay, self.num_ahead = name, replay, num_ahead
        self.batch, self.learn_s, self.busy = arguments.batch, arguments.learn_ms / 1000, arguments.busy
        self.block = replay.layout.block(self.batch)
        self.rng, self.rates, self.costs = np.random.default_rng(0), list[float](), list[float]()

    def round(self, seconds: float) -> None:
        replay, count, drafts = self.replay, 0, collections.deque[Draft]()
        start, cost = time.perf_counter(), time.process_time()
        while (now := time.perf_counter()) < start + seconds:
            replay.advance()
            while len(drafts) <= self.num_ahead:
                drafts.append(replay.draw(self.batch, 0.4, self.rng))
            drawn = replay.collect(drafts.popleft(), self.block)
            if self.busy:
                until = time.perf_counter() + self.learn_s
                while time.perf_counter() < until:
                    pass
            elif self.learn_s:
                time.sleep(self.learn_s)
            replay.update(drawn.keys, self.rng.random(self.batch))
            count += self.batch
        self.rates.append(count / (now - start))
        self.costs.append(count / (time.process_time() - cost))
        for draft in drafts:
            replay.collect(draft, self.block)


def measure(folder: Path, arguments: argparse.Namespace) -> None:
    layout = layout_of(arguments.frames, arguments.capacity // arguments.shards)
    rule = LimiterRule(0.0, 1, arguments.capacity, arguments.batch, 64, num_shards=arguments.shards)
    wire = ReplayWire(layout, range(arguments.shards), rule)
    if arguments.serve:
        serve(folder, wire, rule)
        return
    shards = [Shard.at(folder, index, layout) for index in range(arguments.shards)]
    for shard in shards:
        fill(shard, np.random.default_rng(0))
    command = [sys.executable, __file__, "--serve", str(folder), *sys.argv[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        columns = [PriorityColumn(layout.capacity) for _ in shards]
        link = Link(address, wire, columns, Limiter(rule))
        link.arrive(30.0)
        remote, local = Replay(link.readers), Replay([ShardReader(shard) for shard in shards])
        while remote.size < local.size:
            remote.advance()
        settings = [Setting("in place", local, 0, arguments)]
        settings += [Setting(f"tcp, {k} ahead", remote, k, arguments) for k in AHEAD]
        server_s, items = 0.0, 0.0
        for _ in range(arguments.rounds):
            for setting in settings:
                before = cpu_seconds(server.pid) or 0.0
                setting.round(arguments.seconds)
                if setting.num_ahead or setting.replay is remote:
                    server_s += (cpu_seconds(server.pid) or 0.0) - before
                    items += setting.rates[-1] * arguments.seconds
        link.close()
        server.kill()
    report(settings, arguments, items / server_s)


def report(settings: list[Setting], arguments: argparse.Namespace, per_server_s: float) -> None:
    print(f"{arguments.frames or '8 floats'}, batches of {arguments.batch}, {arguments.shards} shards, ", end="")
    print(f"learning takes {arguments.learn_ms:g} ms{' of the processor' if arguments.busy else ''}")
    base = statistics.median(settings[0].rates)
    rows = {}
    for setting in settings:
        rate, cost = statistics.median(setting.rates), statistics.median(setting.costs)
        rows[setting.name] = {"samples_per_s": rate, "samples_per_learner_cpu_s": cost}
        print(f"  {setting.name:14} {rate:12,.0f} samples/s  {rate / base:5.2f}  {cost:12,.0f} per learner-CPU-second")
    print(f"  the server serves {per_server_s:,.0f} samples per second of its processor time")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"settings": rows, "per_server_cpu_s": per_server_s}, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", default="", help="HEIGHTxWIDTHxSTACK; default: 8 floats per observation")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--capacity", type=int, default=40_960, help="items over all shards")
    parser.add_argument("--learn-ms", type=float, default=0.0)
    parser.add_argument("--busy", action="store_true", help="learning uses the processor instead of sleeping")
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of one round of one setting")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", default="", help="write the figures to this file")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        measure(Path(arguments.serve), arguments)
        return
    folder = Path(tempfile.mkdtemp(prefix="echelon-bench-", dir="/dev/shm"))
    try:
        measure(folder, arguments)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
