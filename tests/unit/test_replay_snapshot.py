"""Snapshots: restored exactly, written while actors append, refused where they do not fit."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echelon.errors import ConfigError
from echelon.replay import snapshot
from echelon.replay.frames import FrameWriter
from echelon.replay.layout import ShardLayout, item_layout
from echelon.replay.limiter import Limiter, LimiterRule
from echelon.replay.reader import ShardReader
from echelon.replay.restore import DamagedSnapshot, restore
from echelon.replay.shard import Shard, ShardWriter
from echelon.replay.sharded import Replay
from echelon.replay.snapshot import HEADER, Snapshot

Array = np.ndarray[Any, Any]
RULE = LimiterRule(samples_per_insert=2.0, min_size=4, capacity=1000, batch=8, chunk=30, num_shards=2)


def layout(capacity: int = 50, num_frames: int = 0) -> ShardLayout:
    fields: dict[str, Any] = {"observation": ((3, 4), np.uint8), "number": ((), np.int64), "sum": ((), np.float32)}
    return item_layout(fields, capacity, {"observation": "frames"}, num_frames)


class Actors:
    """Two shards whose items can be checked; `play` appends to both."""

    def __init__(self, shape: ShardLayout) -> None:
        self.shards = [Shard(shape) for _ in range(2)]
        self.writers = [ShardWriter(shard) for shard in self.shards]
        self.frames = [FrameWriter(writer, "frames", 1) for writer in self.writers]
        self.stacks = np.zeros((2, 1, 3, 4), np.uint8)
        self.rng = np.random.default_rng(0)

    def play(self, count: int, limiter: Limiter | None = None) -> None:
        for shard, writer in enumerate(self.writers):
            for _ in range(count):
                self.stacks[shard] = np.roll(self.stacks[shard], -1, 1)
                self.stacks[shard][:, -1] = self.rng.integers(0, 256, 4)
                fields = {
                    "observation": self.frames[shard].store(self.stacks[shard]),
                    "number": np.array([writer.head]),
                    "sum": self.stacks[shard].sum((1, 2), dtype=np.float32),
                }
                writer.append(fields, self.rng.random(1) + 0.01)
            if limiter is not None:
                limiter.note_inserted(shard, writer.head)


def check(drawn: Any) -> None:
    np.testing.assert_array_equal(drawn.fields["number"], drawn.keys.number)
    np.testing.assert_array_equal(drawn.fields["observation"].sum((1, 2), dtype=np.float32), drawn.fields["sum"])


def fresh(shape: ShardLayout) -> list[ShardReader]:
    return [ShardReader(Shard(shape)) for _ in range(2)]


@pytest.mark.parametrize("alpha", [0.0, 0.6])
@pytest.mark.parametrize("length", [30, 130])  # before and after the rings wrap
def test_it_is_taken_back_exactly(tmp_path: Path, alpha: float, length: int) -> None:
    actors, limiter = Actors(layout()), Limiter(RULE)
    replay = Replay([ShardReader(shard) for shard in actors.shards], alpha)
    rng = np.random.default_rng(1)
    for _ in range(length // 10):
        actors.play(10, limiter)
        replay.advance()
        drawn = replay.sample(8, 0.4, rng)
        replay.update(drawn.keys, rng.random(8).astype(np.float32))
        limiter.note_sampled(0, 8)
    Snapshot(tmp_path / "one", replay, limiter, {"updates": 7}).write()
    readers, other = fresh(layout()), Limiter(RULE)
    assert restore(tmp_path / "one", readers, other) == {"updates": 7}
    again = Replay(readers, alpha)
    assert again.sizes == replay.sizes and again.mass == replay.mass and other.state() == limiter.state()
    ours, theirs = np.random.default_rng(2), np.random.default_rng(2)
    for _ in range(5):
        a, b = again.sample(16, 0.4, ours), replay.sample(16, 0.4, theirs)
        check(a)
        for left, right in ((a.keys.shard, b.keys.shard), (a.keys.number, b.keys.number), (a.weights, b.weights)):
            np.testing.assert_array_equal(left, right)
        for name, value in a.fields.items():
            if name != "observation":
                np.testing.assert_array_equal(value, b.fields[name])
        new = ours.random(16)
        assert again.update(a.keys, new) == replay.update(b.keys, theirs.random(16)) == 16
    # Training continues: writers resume where the old ones stopped, and the same items are evicted.
    for writer in (actors.writers[0], ShardWriter(readers[0].shard)):
        numbers = FrameWriter(writer, "frames", 1).store(np.ones((1, 3, 4), np.uint8))
        fields = {"observation": numbers, "number": np.array([writer.head]), "sum": np.array([12.0], np.float32)}
        writer.append(fields, np.ones(1))
        writer.store("frames", {"frame": np.ones((60, 4), np.uint8)}, 60)
    assert again.advance() == replay.advance() == 1
    assert 0 < again.sizes[0] < 10 and again.sizes == replay.sizes and again.mass == replay.mass
    check(again.sample(again.size, 0.4, ours))


@pytest.mark.parametrize("num_frames", [0, 35])  # rows are overwritten first, or frames
def test_actors_go_on_while_it_is_written_and_what_they_overwrite_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_frames: int
) -> None:
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 128)  # so that it takes many steps
    actors = Actors(layout(num_frames=num_frames))
    replay = Replay([ShardReader(shard) for shard in actors.shards], 0.6)
    actors.play(70)
    replay.advance()
    cut = [replay.window(shard) for shard in range(2)]
    for num_chunks, _ in enumerate(Snapshot(tmp_path / "one", replay).chunks()):
        actors.play(num_chunks % 2)
        replay.advance()
    assert num_chunks > 20
    readers = fresh(layout(num_frames=num_frames))
    restore(tmp_path / "one", readers)
    again = Replay(readers, 0.6)
    for shard, (start, head) in enumerate(cut):
        kept = again.window(shard)
        assert start < kept[0] < kept[1] == head, "some were overwritten, the others are there"
    drawn = again.sample(again.size, 0.4, np.random.default_rng(0))
    check(drawn)


def test_an_empty_replay_is_a_snapshot_too(tmp_path: Path) -> None:
    readers = fresh(layout())
    Snapshot(tmp_path / "one", Replay(readers, 0.6)).write()
    others = fresh(layout())
    assert restore(tmp_path / "one", others) == {}
    assert Replay(others, 0.6).size == 0


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A snapshot of a few items."""
    actors = Actors(layout())
    actors.play(5)
    replay = Replay([ShardReader(shard) for shard in actors.shards], 0.6)
    Snapshot(tmp_path / "one", replay, Limiter(RULE)).write()
    return tmp_path / "one"


def assert_empty(readers: list[ShardReader], limiter: Limiter) -> None:
    replay = Replay(readers, 0.6)
    assert replay.size == 0 and replay.mass.total == 0.0 and limiter.inserted == limiter.sampled == 0


def test_one_of_another_replay_is_refused_before_anything_is_touched(written: Path) -> None:
    readers, limiter = fresh(layout()), Limiter(RULE)
    with pytest.raises(ConfigError, match="has 2 shards, but this replay has 1"):
        restore(written, readers[:1], limiter)
    with pytest.raises(ConfigError, match=r"capacity of a shard: 50 in the snapshot, 51 here"):
        restore(written, fresh(layout(51)), limiter)
    other = LimiterRule(samples_per_insert=2.0, min_size=4, capacity=1000, batch=8, chunk=30, num_shards=3)
    with pytest.raises(ConfigError, match="has 2 shards, but this run has 3"):
        restore(written, readers, Limiter(other))
    assert_empty(readers, limiter)
    restore(written, readers, limiter)
    with pytest.raises(ConfigError, match="already holds items"):
        restore(written, readers, limiter)
    record = json.loads((written / HEADER).read_text())
    text = json.dumps(record["snapshot"] | {"format": 1})
    (written / HEADER).write_text(f'{{"crc32": {zlib.crc32(text.encode())}, "snapshot": {text}}}')
    with pytest.raises(ConfigError, match="has format 1; this Echelon reads format 3"):
        restore(written, fresh(layout()), limiter)


FILES = ["replay.json", "shard-0.rows", "shard-1.rows", "shard-1.ring-0", "shard-1.priorities"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", ["flipped", "short", "long", "empty", "gone", "folder"])
def test_a_damaged_one_is_refused_and_leaves_the_replay_empty(written: Path, file: str, harm: str) -> None:
    path = written / file
    content = path.read_bytes()
    path.unlink()
    if harm == "folder":
        path.mkdir()
    elif harm != "gone":
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 4
        path.write_bytes({"flipped": flipped, "short": content[:-1], "long": content + b"x", "empty": b""}[harm])
    readers, limiter = fresh(layout()), Limiter(RULE)
    if (file, harm) == ("replay.json", "short"):  # only the newline at its end
        path.write_bytes(content[:-2])
    with pytest.raises(DamagedSnapshot, match=rf"{re.escape(str(written))}.*{re.escape(file)}"):
        restore(written, readers, limiter)
    assert_empty(readers, limiter)


def test_every_single_flipped_bit_of_the_header_is_found(written: Path) -> None:
    content = (written / HEADER).read_bytes()
    rng = np.random.default_rng(0)
    for place, bit in zip(rng.integers(0, len(content) - 1, 200), rng.integers(0, 8, 200), strict=True):
        flipped = bytearray(content)
        flipped[place] ^= 1 << int(bit)
        (written / HEADER).write_bytes(flipped)
        with pytest.raises(DamagedSnapshot):
            restore(written, fresh(layout()), Limiter(RULE))


def test_a_crash_leaves_only_what_the_next_one_removes(tmp_path: Path) -> None:
    actors = Actors(layout())
    actors.play(5)
    replay = Replay([ShardReader(shard) for shard in actors.shards], 0.6)
    crashed = Snapshot(tmp_path / "one", replay).chunks()
    next(crashed)
    left = tmp_path / "left"
    shutil.copytree(tmp_path / "one.part", left)
    crashed.close()
    assert [path.name for path in tmp_path.iterdir()] == ["left"], "one that is given up cleans up by itself"
    left.rename(tmp_path / "one.part")
    Snapshot(tmp_path / "one", replay).write()
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_one_of_the_same_name_is_replaced_at_the_end_and_nothing_else_ever_is(tmp_path: Path) -> None:
    actors = Actors(layout())
    actors.play(5)
    replay = Replay([ShardReader(shard) for shard in actors.shards], 0.6)
    Snapshot(tmp_path / "one", replay, counters={"n": 1}).write()
    for _ in Snapshot(tmp_path / "one", replay, counters={"n": 2}).chunks():
        assert restore(tmp_path / "one", fresh(layout())) == {"n": 1}
    assert restore(tmp_path / "one", fresh(layout())) == {"n": 2}
    (tmp_path / "thesis").mkdir()
    with pytest.raises(ConfigError, match="exists and is not a snapshot"):
        Snapshot(tmp_path / "thesis", replay)


def test_what_it_takes_is_known_before_it_is_written(tmp_path: Path) -> None:
    actors = Actors(layout())
    actors.play(130)
    snapshot = Snapshot(tmp_path / "one", Replay([ShardReader(shard) for shard in actors.shards], 0.6))
    snapshot.write()
    found = sum(path.stat().st_size for path in (tmp_path / "one").iterdir() if path.name != HEADER)
    assert snapshot.nbytes == found > 0
