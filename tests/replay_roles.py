"""Processes that write replay shards and learn from them, with a checksum in every item; they need no torch.

Run as `python replay_roles.py write|learn FOLDER INDEX HEAD`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from echelon.replay.layout import ShardLayout, item_layout
from echelon.replay.limiter import Limiter, LimiterRule
from echelon.replay.reader import ShardReader
from echelon.replay.shard import Shard, ShardWriter
from echelon.replay.sharded import Replay

Array = np.ndarray[Any, Any]
NUM_SHARDS, CAPACITY, CHUNK, BATCH = 4, 512, 64, 128
FIELDS: dict[str, Any] = {
    "payload": ((16,), np.float32),
    "number": ((), np.int64),
    "priority": ((), np.float64),
    "checksum": ((), np.float64),
}
RULE = LimiterRule(
    samples_per_insert=4.0,
    min_size=1024,
    capacity=NUM_SHARDS * CAPACITY,
    batch=BATCH,
    chunk=CHUNK,
    num_shards=NUM_SHARDS,
    tolerance=5000.0,
)


def layout() -> ShardLayout:
    return item_layout(FIELDS, CAPACITY)


def open_replay(folder: Path) -> Replay:
    return Replay([ShardReader.at(folder, index, layout()) for index in range(NUM_SHARDS)], alpha=1.0)


def first_priority(number: Array) -> Array:
    priority: Array = 0.1 + 0.9 * (number % 10)
    return priority


def learned_priority(number: Array) -> Array:
    """A priority that no actor assigns."""
    priority: Array = 100.0 + number % 10
    return priority


def checksum(fields: dict[str, Array]) -> Array:
    total: Array = fields["payload"].astype(np.float64).sum(1) + 3.0 * fields["number"] + 7.0 * fields["priority"]
    return total


def write(folder: Path, index: int, head: int) -> None:
    """Appends chunks of various sizes up to `head` items, or forever."""
    writer, limiter = ShardWriter(Shard.at(folder, index, layout())), Limiter.at(folder, RULE)
    rng = np.random.default_rng([index, writer.head])
    while writer.head < head or not head:
        if not limiter.wait_to_insert(5.0):
            continue
        count = int(rng.integers(1, CHUNK + 1))
        number = writer.head + np.arange(count)
        payload = rng.random((count, 16), np.float32)
        fields: dict[str, Array] = {"payload": payload, "number": number, "priority": first_priority(number)}
        writer.append(fields | {"checksum": checksum(fields)}, fields["priority"])
        limiter.note_inserted(index, writer.head)


def learn_once(limiter: Limiter, replay: Replay, rng: np.random.Generator, is_learned: bool = False) -> bool:
    """Samples a batch when the limiter allows, checks every item, and sets the same or new priorities."""
    if not limiter.wait_for_items(lambda: limiter.may_sample(BATCH), 0.05):
        return False
    replay.advance()
    drawn = replay.sample(BATCH, 0.4, rng)
    np.testing.assert_array_equal(drawn.fields["number"], drawn.keys.number)
    np.testing.assert_array_equal(drawn.fields["checksum"], checksum(drawn.fields))
    replay.update(drawn.keys, learned_priority(drawn.keys.number) if is_learned else drawn.fields["priority"])
    limiter.note_sampled(0, BATCH)
    return True


def main() -> None:
    what, folder, index, head = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    if what == "write":
        write(folder, index, head)
    limiter, replay, rng = Limiter.at(folder, RULE), open_replay(folder), np.random.default_rng(index)
    while what == "learn":
        learn_once(limiter, replay, rng, is_learned=True)


if __name__ == "__main__":
    main()
