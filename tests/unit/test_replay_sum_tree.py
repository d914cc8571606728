"""The sum tree against a plain cumulative sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from echelon.replay.layout import ReplayError
from echelon.replay.sum_tree import FAN_OUT, MAX_TOP, SumTree

Array = np.ndarray[Any, Any]
# One level; one full level; two levels, the upper not full; three levels.
CAPACITIES = (1, 7, MAX_TOP, MAX_TOP + 1, MAX_TOP * FAN_OUT + 3)
seeds = st.integers(0, 2**32 - 1)


def changed(tree: SumTree, rng: np.random.Generator, draw: Any) -> Array:
    """Applies a few changes of both kinds to the tree; returns the expected leaves."""
    leaves = np.zeros(tree.capacity)
    for _ in range(4):
        count = int(rng.integers(1, min(tree.capacity, 300) + 1))
        values = draw(count)
        if rng.random() < 0.5:
            start = int(rng.integers(0, tree.capacity - count + 1))
            tree.set_range(start, values)
            leaves[start : start + count] = values
        else:
            indices = rng.integers(0, tree.capacity, count)
            tree.set(indices, values)
            for index, value in zip(indices.tolist(), values.tolist(), strict=True):  # so the last value is used
                leaves[index] = value
    return leaves


@settings(deadline=None, max_examples=60)
@given(capacity=st.sampled_from(CAPACITIES), seed=seeds)
def test_whole_numbers_are_found_exactly_as_in_a_cumulative_sum(capacity: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = SumTree(capacity)
    leaves = changed(tree, rng, lambda n: rng.integers(0, 3, n).astype(np.float64))
    assert tree.total == leaves.sum()
    np.testing.assert_array_equal(tree.get(np.arange(capacity)), leaves)
    if tree.total == 0.0:
        return
    prefix_sums = np.arange(tree.total) if tree.total < 500 else rng.integers(0, int(tree.total), 500).astype(float)
    np.testing.assert_array_equal(tree.find(prefix_sums), np.cumsum(leaves).searchsorted(prefix_sums, "right"))


@settings(deadline=None, max_examples=60)
@given(capacity=st.sampled_from(CAPACITIES), seed=seeds, decades=st.integers(0, 300), zeros=st.floats(0, 0.99))
@example(capacity=MAX_TOP + 1, seed=3, decades=300, zeros=0.9)
def test_nothing_of_priority_0_is_found_whatever_the_rounding(
    capacity: int, seed: int, decades: int, zeros: float
) -> None:
    rng = np.random.default_rng(seed)

    def draw(count: int) -> Array:
        sizes = 10.0 ** -(rng.random(count) * decades)
        return np.where(rng.random(count) < zeros, 0.0, rng.random(count) * sizes)

    tree = SumTree(capacity)
    leaves = changed(tree, rng, draw)
    sums = np.cumsum(leaves)
    if tree.total == 0.0:
        return
    edges = sums[rng.integers(0, capacity, 200)]
    prefix_sums = np.concatenate(
        [edges, np.nextafter(edges, 0), np.nextafter(edges, np.inf), [0.0, tree.total, 2 * tree.total, -1.0]]
    )
    found = tree.find(prefix_sums)
    assert (leaves[found] > 0.0).all()
    # And it is the right item, up to rounding.
    slack = 1e-9 * sums[-1]
    clipped = np.clip(prefix_sums, 0.0, sums[-1])
    assert (sums[found] >= clipped - slack).all() and (sums[found] - leaves[found] <= clipped + slack).all()


@settings(deadline=None, max_examples=40)
@given(capacity=st.sampled_from(CAPACITIES), seed=seeds)
def test_the_same_leaves_give_the_same_tree_bit_by_bit(capacity: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree, rebuilt = SumTree(capacity), SumTree(capacity)
    leaves = changed(tree, rng, rng.random)
    rebuilt.set_range(0, leaves)
    assert tree.total == rebuilt.total
    if tree.total:
        prefix_sums = rng.random(200) * tree.total
        np.testing.assert_array_equal(tree.find(prefix_sums), rebuilt.find(prefix_sums))


def test_its_size_is_what_it_takes() -> None:
    for capacity in CAPACITIES:
        tree = SumTree(capacity)
        arrays = [nodes for nodes, _ in tree._below] + [tree._top, tree._offsets]
        assert abs(SumTree.size(capacity) - sum(array.nbytes for array in arrays)) <= 64


def test_a_tree_of_zeros_finds_nothing_and_says_so() -> None:
    with pytest.raises(ReplayError, match="every priority is 0"):
        SumTree(10).find(np.zeros(3))


@pytest.mark.parametrize("value", [np.nan, -1.0, np.inf, 1e31])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_priorities_that_cannot_be_are_refused_and_nothing_is_changed(value: float, dtype: Any) -> None:
    tree = SumTree(10)
    tree.set(np.array([1, 2]), np.array([1.0, 2.0]))
    with pytest.raises(ReplayError, match=r"priority 1 of 3 is .*Nothing was stored"):
        tree.set(np.array([0, 1, 2]), np.array([5.0, value, 5.0], dtype))
    np.testing.assert_array_equal(tree.get(np.arange(3)), [0.0, 1.0, 2.0])


@pytest.mark.parametrize("index", [-1, 10])
def test_an_index_outside_is_refused_and_nothing_is_changed(index: int) -> None:
    tree = SumTree(10)
    with pytest.raises(ReplayError, match=rf"index {index} is outside 0 to 9"):
        tree.set(np.array([3, index]), np.ones(2))
    assert tree.total == 0.0


def test_no_items_are_no_change() -> None:
    tree = SumTree(10)
    tree.set(np.array([], np.int64), np.array([]))
    tree.set_range(10, np.array([]))
    assert tree.total == 0.0
    with pytest.raises(ReplayError, match="capacity=0"):
        SumTree(0)
