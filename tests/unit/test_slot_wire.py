"""Slots sent to another host arrive unchanged, and each frame of a stack is sent once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import Refused
from echelon.transport.slot_wire import SlotBytes, Stack

Array = np.ndarray[Any, Any]


def filled(layout: SlotBytes, rng: np.random.Generator, resets: float) -> Array:
    """A slot whose stacks shift by one frame from row to row, except after a reset."""
    slot = rng.integers(0, 256, layout.nbytes, np.uint8)
    for stack in layout.stacks:
        rows = stack.of(slot)
        for t in range(1, stack.rows):
            for env in range(stack.envs):
                if rng.random() >= resets:
                    rows[t, env, :-1] = rows[t - 1, env, 1:]
    return slot


def copied(layout: SlotBytes, slot: Array) -> tuple[Array, int]:
    """Returns the slot as received, and the number of bytes sent."""
    parts = [memoryview(bytes(part)) for part in layout.pack(slot)]
    arrived = np.full(layout.nbytes, 7, np.uint8)
    layout.unpack(parts, arrived)
    return arrived, sum(len(part) for part in parts)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 5), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 8, 9, 16]),
    st.integers(0, 2), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 1000),
)  # fmt: skip
def test_a_slot_arrives_as_it_was(
    rows: int, envs: int, frames: int, frame_bytes: int, num_stacks: int, resets: float, seed: int
) -> None:
    stacks, at = [], 8
    for _ in range(num_stacks):
        stacks.append(Stack(at, rows, envs, frames, frame_bytes))
        at += stacks[-1].nbytes + 8
    layout = SlotBytes(at + 5, tuple(stacks))
    slot = filled(layout, np.random.default_rng(seed), resets)
    arrived, _ = copied(SlotBytes.from_wire(layout.to_wire()), slot)
    np.testing.assert_array_equal(arrived, slot)


def test_stacked_frames_travel_once() -> None:
    stack = Stack(0, 21, 8, 4, 84 * 84)
    layout = SlotBytes(stack.nbytes, (stack,))
    slot = filled(layout, np.random.default_rng(0), 0.0)
    arrived, num_bytes = copied(layout, slot)
    np.testing.assert_array_equal(arrived, slot)
    assert num_bytes == (20 + 4) * 8 * 84 * 84 + 20, "each frame once, and a bit for each stack"


@pytest.mark.parametrize("damage", ["missing", "short", "bits"])
def test_what_is_no_slot_is_refused(damage: str) -> None:
    stack = Stack(8, 4, 2, 3, 16)
    layout = SlotBytes(8 + stack.nbytes, (stack,))
    parts = [memoryview(bytes(part)) for part in layout.pack(filled(layout, np.random.default_rng(0), 0.5))]
    if damage == "missing":
        parts.pop()
    elif damage == "short":
        parts[-1] = parts[-1][:-1]
    else:
        parts[1] = memoryview(bytes([parts[1][0] ^ 0x80]) + bytes(parts[1][1:]))
    with pytest.raises(Refused, match="a slot was refused"):
        layout.unpack(parts, np.zeros(layout.nbytes, np.uint8))
