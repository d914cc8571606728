"""Shards: appending, reading in place, torn rows, what a successor finds, and stacks of frames."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import ConfigError, TransportError
from echelon.memory_check import check_fits, free_memory
from echelon.replay.frames import FrameWriter
from echelon.replay.layout import ItemField, ReplayError, ShardLayout, item_layout, spans
from echelon.replay.reader import PriorityColumn, ShardReader
from echelon.replay.shard import HEAD, RESERVE, RINGS, Shard, ShardWriter
from echelon.replay.sharded import Replay

Array = np.ndarray[Any, Any]
FIELDS: dict[str, Any] = {"observation": ((2,), np.float32), "pixel": ((3,), np.uint8), "action": ((), np.int64)}


def items(start: int, count: int) -> dict[str, Array]:
    """Returns items whose fields are all functions of their number."""
    numbers = np.arange(start, start + count)
    return {
        "observation": np.stack([numbers, -numbers], 1).astype(np.float32),
        "pixel": np.stack([numbers % 256, numbers % 7, numbers % 5], 1).astype(np.uint8),
        "action": numbers,
    }


def make(capacity: int) -> tuple[ShardWriter, ShardReader]:
    shard = Shard(item_layout(FIELDS, capacity))
    return ShardWriter(shard), ShardReader(shard)


def read(reader: ShardReader, numbers: list[int]) -> tuple[dict[str, Array], list[bool]]:
    block = reader.layout.block(len(numbers))
    whole = reader.read(np.array(numbers), block)
    return block.fields, whole.tolist()


class TestRing:
    @given(start=st.integers(0, 50), count=st.integers(0, 10), capacity=st.integers(10, 20))
    def test_spans_are_the_slots_of_the_numbers(self, start: int, count: int, capacity: int) -> None:
        pieces = list(spans(start, start + count, capacity))
        slots = [slot for where, _ in pieces for slot in range(where.start, where.stop)]
        rows = [row for _, where in pieces for row in range(where.start, where.stop)]
        assert slots == [number % capacity for number in range(start, start + count)] and rows == list(range(count))

    @settings(deadline=None)
    @given(capacity=st.integers(1, 20), chunks=st.lists(st.integers(0, 20), max_size=12))
    def test_the_last_items_are_there_and_the_others_are_known_to_be_gone(
        self, capacity: int, chunks: list[int]
    ) -> None:
        writer, reader = make(capacity)
        head = 0
        for chunk in chunks:
            count = min(chunk, capacity)
            assert writer.append(items(head, count), np.arange(head, head + count, dtype=float)) == head
            head += count
        tail = max(0, head - capacity)
        assert reader.window() == (tail, head) and writer.head == head
        if head == 0:
            return
        fields, whole = read(reader, list(range(head)))
        assert whole == [number >= tail for number in range(head)]
        for name, expected in items(tail, head - tail).items():
            np.testing.assert_array_equal(fields[name][tail:], expected)
            assert fields[name].dtype == FIELDS[name][1]
        np.testing.assert_array_equal(reader.initial(tail, head), np.arange(tail, head))

    def test_what_is_being_overwritten_is_torn_before_it_is_gone(self) -> None:
        writer, reader = make(10)
        writer.append(items(0, 10), np.ones(10))
        writer.shard.words[RESERVE] = 13  # as in the middle of an append of three
        assert read(reader, [2, 3])[1] == [False, True] and reader.window() == (3, 10)

    def test_a_successor_goes_on_at_head_and_what_its_predecessor_spoilt_stays_torn(self) -> None:
        writer, reader = make(10)
        writer.append(items(0, 10), np.ones(10))
        writer.shard.words[RESERVE] = 15  # it died while it was appending five
        successor = ShardWriter(writer.shard)
        assert successor.append(items(10, 2), np.ones(2)) == 10
        assert read(reader, [2, 4, 5, 10, 11])[1] == [False, False, True, True, True]
        assert reader.window() == (5, 12)

    def test_a_window_is_that_of_one_moment(self) -> None:
        """The words are read one by one; a concurrent append must not make a full shard look empty."""
        writer, reader = make(10)
        writer.append(items(0, 10), np.ones(10))

        class Overrun:
            """The words of a shard; the actor changes all of them after the first is read."""

            is_fresh = True

            def __getitem__(self, index: int) -> int:
                value = words[index]
                if index == HEAD and self.is_fresh:
                    self.is_fresh = False
                    for _ in range(2):
                        writer.append(items(writer.head, 6), np.ones(6))
                return int(value)

        words = reader.shard.words
        overrun: Any = Shard.__new__(Shard)
        overrun.words, overrun.layout = Overrun(), reader.layout
        assert Shard.window(overrun) == (12, 22)


class TestRefusals:
    def test_items_that_do_not_fit_are_refused_and_nothing_is_changed(self) -> None:
        writer, reader = make(4)
        writer.append(items(0, 2), np.ones(2))
        good = items(2, 2)
        bad: list[tuple[dict[str, Array], Array, str]] = [
            (good, np.array([1.0, np.nan]), "priority 1 of 2 is nan"),
            (good, np.array([-1.0, 1.0]), "priority 0 of 2 is -1.0"),
            ({**good, "action": np.zeros(3, np.int64)}, np.ones(2), r"field action is \(3,\) of int64"),
            ({**good, "action": np.zeros(2)}, np.ones(2), r"action is \(2,\) of float64, expected \(2,\) of int64"),
            ({**good, "observation": np.zeros((2, 3), np.float32)}, np.ones(2), "field observation is .*spaces"),
            ({"action": good["action"]}, np.ones(2), "field observation is missing"),
            ({**good, "extra": np.zeros(2)}, np.ones(2), r"no field \['extra'\]"),
            (items(2, 5), np.ones(5), "5 items exceeds its capacity of 4"),
        ]
        before = writer.shard.items.records.copy()
        for fields, priorities, message in bad:
            with pytest.raises(ReplayError, match=message):
                writer.append(fields, priorities)
        assert reader.window() == (0, 2) and writer.shard.words[RESERVE] == 2
        np.testing.assert_array_equal(writer.shard.items.records, before)

    def test_a_layout_that_cannot_be_is_refused(self) -> None:
        with pytest.raises(ReplayError, match="0 items"):
            item_layout(FIELDS, 0)
        with pytest.raises(ReplayError, match=r"fields \[\]"):
            item_layout({}, 1)
        with pytest.raises(ReplayError, match="numbers and booleans only"):
            item_layout({"text": ((), np.object_)}, 1)
        with pytest.raises(ReplayError, match="not a stack of 4"):
            ItemField("o", (3, 8), np.dtype(np.uint8), "frames", 4)
        with pytest.raises(ReplayError, match=r"side rings \['frames'\]"):
            ShardLayout((ItemField("o", (4, 8), np.dtype(np.uint8), "frames", 4),), 1)
        with pytest.raises(ReplayError, match="another shape or dtype"):
            item_layout({"a": ((4, 8), np.uint8), "b": ((4, 9), np.uint8)}, 1, {"a": "frames", "b": "frames"})

    def test_more_than_the_memory_is_refused_with_what_it_needs(self, shm_dir: Path) -> None:
        layout = item_layout(FIELDS, 10**13)
        with pytest.raises(ConfigError, match=r"needs 320000\.00 GB of memory, .* free. Lower replay.capacity"):
            Shard(layout)
        with pytest.raises(ConfigError, match=r"needs 320000\.00 GB in .* free. Lower replay.capacity"):
            Shard.at(shm_dir, 0, layout)
        assert not list(shm_dir.iterdir())
        check_fits(1, "one byte", free_memory(shm_dir))

    def test_another_layout_at_the_same_place_is_refused(self, shm_dir: Path) -> None:
        Shard.at(shm_dir, 0, item_layout(FIELDS, 10))
        with pytest.raises(TransportError, match="created for other spaces"):
            Shard.at(shm_dir, 0, item_layout(FIELDS, 11))
        PriorityColumn.at(shm_dir, 0, 10)
        with pytest.raises(TransportError, match="created for other spaces"):
            PriorityColumn.at(shm_dir, 0, 100)


def stack_layout(capacity: int, stack: int, frame: tuple[int, ...], **changes: Any) -> ShardLayout:
    shape = (stack, *frame)
    fields: dict[str, Any] = {
        "observation": (shape, np.uint8),
        "next_observation": (shape, np.uint8),
        "action": ((), np.int64),
        "reward": ((), np.float32),
        "discount": ((), np.float32),
    }
    return item_layout(fields, capacity, {"observation": "frames", "next_observation": "frames"}, **changes)


class Stacking:
    """K environments with stacked random frames; some are reset at every step.

    The first stack of an episode is one frame repeated, as gymnasium makes it, or `varied`.
    """

    def __init__(self, rng: np.random.Generator, num_envs: int, shape: tuple[int, ...], varied: bool = False) -> None:
        self.rng, self.frame, self.num_first = rng, shape[1:], shape[0] if varied else 1
        self.stacks = np.zeros((num_envs, *shape), np.uint8)
        self.begin(np.ones(num_envs, np.bool_))

    def begin(self, which: Array) -> None:
        self.stacks[which] = self.rng.integers(0, 256, (int(which.sum()), self.num_first, *self.frame))

    def step(self, reset_chance: float) -> Array:
        """Makes one step; returns the environments that were reset."""
        self.stacks = np.roll(self.stacks, -1, 1)
        self.stacks[:, -1] = self.rng.integers(0, 256, (len(self.stacks), *self.frame))
        begun: Array = self.rng.random(len(self.stacks)) < reset_chance
        self.begin(begun)
        return begun


class TestFrames:
    @settings(deadline=None, max_examples=40)
    @given(
        seed=st.integers(0, 2**32 - 1),
        num_envs=st.integers(1, 4),
        stack=st.integers(1, 4),
        reset_chance=st.sampled_from([0.0, 0.1, 0.7]),
        frame=st.sampled_from([(2, 4), (3,)]),
        varied=st.booleans(),
    )
    def test_stacks_come_back_as_they_were_or_are_known_to_be_gone(
        self, seed: int, num_envs: int, stack: int, reset_chance: float, frame: tuple[int, ...], varied: bool
    ) -> None:
        rng = np.random.default_rng(seed)
        shard = Shard(stack_layout(40, stack, frame))
        writer, reader = ShardWriter(shard), ShardReader(shard)
        envs = Stacking(rng, num_envs, (stack, *frame), varied)
        frames = FrameWriter(writer, "frames", num_envs)
        replay = Replay([reader], alpha=1.0)
        stored: list[tuple[Array, Array]] = []
        before, numbers = envs.stacks.copy(), frames.store(envs.stacks)
        for _ in range(60):
            envs.step(reset_chance)
            next_numbers = frames.store(envs.stacks)
            fields = {"observation": numbers, "next_observation": next_numbers, "action": np.arange(num_envs)}
            fields |= {name: np.zeros(num_envs, np.float32) for name in ("reward", "discount")}
            writer.append(fields, np.ones(num_envs))
            stored += zip(before, envs.stacks.copy(), strict=True)
            before, numbers = envs.stacks.copy(), next_numbers
            replay.advance()
            start, stop = replay.window(0)
            assert stop == len(stored) and stop - start == replay.size == round(replay.mass.total)
        block = reader.layout.block(len(stored))
        whole = reader.read(np.arange(len(stored)), block)
        start, stop = reader.window()
        assert whole[start:].all() and whole.sum() <= 40 and stop > start
        assert stop - start == 40 or varied
        assert stop - start < 40 or not (varied and stack > 2 and reset_chance > 0.5), "then frames run out first"
        for number in np.flatnonzero(whole):
            np.testing.assert_array_equal(block.stacks["observation"][number], stored[number][0])
            np.testing.assert_array_equal(block.stacks["next_observation"][number], stored[number][1])
        drawn = replay.sample(stop - start, 1.0, rng)
        for row, number in enumerate(drawn.keys.number):
            np.testing.assert_array_equal(drawn.fields["next_observation"][row], stored[number][1])

    def test_a_new_observation_costs_one_frame_and_a_reset_its_distinct_ones(self) -> None:
        shard = Shard(stack_layout(100, 4, (8, 8)))
        writer = ShardWriter(shard)
        frames = FrameWriter(writer, "frames", 2)
        envs = Stacking(np.random.default_rng(0), 2, (4, 8, 8))
        assert frames.store(envs.stacks).tolist() == [[0] * 4, [1] * 4]
        envs.step(0.0)
        assert frames.store(envs.stacks).tolist() == [[0, 0, 0, 2], [1, 1, 1, 3]]
        envs.step(0.0)
        assert frames.store(envs.stacks).tolist() == [[0, 0, 2, 4], [1, 1, 3, 5]]
        envs.begin(np.array([False, True]))
        envs.stacks[0] = np.roll(envs.stacks[0], -1, 0)
        envs.stacks[0, -1] = 77
        assert frames.store(envs.stacks).tolist() == [[0, 2, 4, 6], [7] * 4]
        assert shard.words[RINGS] == 8

    @pytest.mark.parametrize("num_frames", [8, 9, 12, 20])
    def test_frames_that_are_about_to_be_overwritten_are_stored_again(self, num_frames: int) -> None:
        shard = Shard(stack_layout(100, 4, (8,), num_frames=num_frames))
        frames = FrameWriter(ShardWriter(shard), "frames", 2)
        envs = Stacking(np.random.default_rng(0), 2, (4, 8))
        for _ in range(20):
            envs.step(0.0)
            numbers = frames.store(envs.stacks)
            kept = shard.words[RINGS] - num_frames
            assert (numbers >= kept).all()
            for env, stack in enumerate(numbers):
                np.testing.assert_array_equal(shard.sides[0].columns["frame"][stack % num_frames], envs.stacks[env])

    def test_a_first_observation_follows_nothing(self) -> None:
        frames = FrameWriter(ShardWriter(Shard(stack_layout(10, 4, (8,)))), "frames", 1)
        assert frames.store(np.zeros((1, 4, 8), np.uint8)).tolist() == [[0, 0, 0, 0]]

    def test_a_frame_with_a_nan_is_shared_too(self) -> None:
        layout = item_layout({"observation": ((2, 3), np.float32)}, 10, {"observation": "frames"})
        writer = ShardWriter(Shard(layout))
        frames = FrameWriter(writer, "frames", 1)
        frames.store(np.full((1, 2, 3), np.nan, np.float32))
        stack = np.concatenate([np.full((1, 1, 3), np.nan, np.float32), np.ones((1, 1, 3), np.float32)], 1)
        assert frames.store(stack).tolist() == [[0, 1]]

    def test_what_does_not_fit_is_refused(self) -> None:
        writer = ShardWriter(Shard(stack_layout(10, 4, (8,), num_frames=5)))
        with pytest.raises(ReplayError, match=r"stacks are \(1, 4, 9\)"):
            FrameWriter(writer, "frames", 1).store(np.zeros((1, 4, 9), np.uint8))
        with pytest.raises(ReplayError, match="6 rows exceeds the 5 of ring frames"):
            FrameWriter(writer, "frames", 6).store(np.zeros((6, 4, 8), np.uint8))
        with pytest.raises(ReplayError, match="ring pixels needs stacks of one shape"):
            FrameWriter(writer, "pixels", 1)

    def test_a_million_atari_transitions_take_less_than_one_frame_and_a_tenth_each(self) -> None:
        needed = Replay.size_of(stack_layout(1_000_000, 4, (84, 84)), 1)
        assert needed <= 1_000_000 * 1.1 * 84 * 84 and needed <= 7.8e9


def test_writers_need_no_torch() -> None:
    modules = "shard, reader, sharded, frames, nstep, limiter, episodes, snapshot, sum_tree"
    code = f"import sys; from echelon.replay import {modules}; assert not {{'torch', 'gymnasium'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
