"""Pieces of episodes: their transitions equal those of single steps, however the episode is split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.asynchronous.open_episodes import OpenEpisodes
from echelon.envs.vector import StepRows
from echelon.layout import Leaf
from echelon.replay.nstep import NStep
from echelon.replay.pieces import fold, spans_of

Array = np.ndarray[Any, Any]
GAMMA = 0.97


def step_by_step(reward: Array, n_step: int, terminated: bool, truncated: bool) -> list[tuple[Any, ...]]:
    """Returns start, stop, reward and discount of the transitions that `NStep` makes from one environment."""
    window, found = NStep(1, n_step, GAMMA), []
    for t in range(len(reward)):
        last = t == len(reward) - 1
        ends = (np.array([last and terminated]), np.array([last and truncated]))
        done = window.push({"t": np.array([t])}, reward[t : t + 1], ends, np.array([True]))
        for start, value, discount in zip(done.start["t"], done.reward, done.discount, strict=True):
            found.append((int(start), t + 1, value, discount))
    return sorted(found)


ENDS = st.sampled_from([(True, False), (False, True), (False, False)])


@given(st.integers(1, 12), st.integers(1, 6), ENDS, st.integers(0, 1000))
def test_spans_are_those_of_single_steps_to_the_last_bit(
    length: int, n_step: int, ends: tuple[bool, bool], seed: int
) -> None:
    reward = np.random.default_rng(seed).normal(size=length).astype(np.float32)
    spans = spans_of(reward, n_step, GAMMA, terminated=ends[0], truncated=ends[1])
    mine = list(zip(spans.start.tolist(), spans.stop.tolist(), spans.reward, spans.discount, strict=True))
    assert mine == step_by_step(reward, n_step, *ends)


@given(st.integers(1, 15), st.integers(2, 5), st.integers(0, 1000))
def test_folded_stacks_unfold(count: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    stacks: list[Array] = []
    for _ in range(count):
        new = rng.integers(0, 3, (size, 2, 2), np.uint8)
        if stacks and rng.random() < 0.7:
            new[:-1] = stacks[-1][1:]
        elif rng.random() < 0.5:
            new[:] = new[0]
        stacks.append(new)
    stacked = np.array(stacks)
    folded = fold(stacked)
    np.testing.assert_array_equal(folded.frames[folded.numbers], stacked)


def test_a_stack_that_goes_on_brings_one_frame() -> None:
    frames = np.arange(13, dtype=np.uint8).reshape(13, 1, 1)
    stacks = np.lib.stride_tricks.sliding_window_view(frames, 4, axis=0).transpose(0, 3, 1, 2)
    stacks = np.concatenate([np.repeat(stacks[:1, :1], 4, 1), stacks])  # as after a reset: one frame four times
    folded = fold(np.ascontiguousarray(stacks))
    assert len(folded.frames) == 1 + 4 + 9, "the reset has one, the next stack shares none, then one per step"


class Stream:
    """The pieces of one environment, joined again."""

    def __init__(self, n_step: int) -> None:
        self.n_step, self.transitions = n_step, list[tuple[Any, ...]]()
        self.lengths: list[int] = []

    def take(self, stretch: Any, first: int) -> None:
        """`first` is the step of the episode that the piece starts with."""
        ends = {"terminated": stretch.terminated, "truncated": stretch.truncated}
        spans = spans_of(stretch.reward, self.n_step, GAMMA, **ends)
        np.testing.assert_array_equal(stretch.observation[0][:, 0], np.arange(first, first + len(stretch.reward) + 1))
        np.testing.assert_array_equal(stretch.action, stretch.observation[0][:-1, 0] % 7)
        for start, stop, reward, discount in zip(spans.start, spans.stop, spans.reward, spans.discount, strict=True):
            self.transitions.append((first + int(start), first + int(stop), reward, discount))
        self.lengths.append(len(stretch.reward) - stretch.num_old)


@settings(max_examples=40)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 6), st.integers(0, 1000))
def test_an_episode_in_pieces_has_the_transitions_of_the_whole(length: int, n_step: int, extra: int, seed: int) -> None:
    """This holds however small the pieces are; every step is there exactly once."""
    max_steps = n_step + extra
    reward = np.random.default_rng(seed).normal(size=length).astype(np.float32)
    episodes = OpenEpisodes(
        1, max_steps, n_step, [Leaf("o", (1,), np.dtype(np.float32))], Leaf("a", (), np.dtype(np.int64))
    )
    flags = [np.zeros(1, np.bool_) for _ in range(3)]
    rows = StepRows([np.zeros((1, 1), np.float32)], np.zeros(1, np.float32), *flags)
    episodes.begin(np.array([0]), rows.observation)
    stream, first = Stream(n_step), 0
    for t in range(length):
        rows.observation[0][:], rows.reward[:], rows.valid[:] = t + 1, reward[t], True
        rows.truncated[:] = t == length - 1
        for stretch in episodes.step(np.array([t % 7]), 1, rows):
            stream.take(stretch, first)
            if stretch.ended:
                episodes.end(0, evaluates=False)
                assert stretch.episode_length == length
                assert stretch.episode_return == pytest.approx(float(reward.astype(np.float64).sum()))
            else:
                first = t + 1 - min(n_step - 1, len(stretch.reward))
                episodes.continue_episode(0)
    assert sum(stream.lengths) == length
    assert sorted(stream.transitions) == step_by_step(reward, n_step, False, True)


def test_lanes_keep_apart_what_trains_and_what_evaluates() -> None:
    """An evaluation keeps no steps, a reset row belongs to no episode, a replaced environment loses its steps."""
    episodes = OpenEpisodes(3, 4, 1, [Leaf("o", (), np.dtype(np.float32))], Leaf("a", (), np.dtype(np.int64)))
    rows = StepRows([np.zeros(3, np.float32)], np.ones(3, np.float32), *(np.zeros(3, np.bool_) for _ in range(3)))
    episodes.begin(np.arange(3), rows.observation)
    episodes.evaluates[1] = True
    rows.valid[:] = True
    assert episodes.step(np.zeros(3, np.int64), 5, rows) == []
    rows.valid[2] = False  # replaced after an error
    rows.terminated[:2] = True
    found = {stretch.env: stretch for stretch in episodes.step(np.zeros(3, np.int64), 6, rows)}
    assert set(found) == {0, 1} and found[1].evaluates and len(found[1].reward) == 0
    assert (found[1].episode_return, found[1].episode_length, found[1].first_version) == (2.0, 2, 5)
    assert found[0].version.tolist() == [5, 6] and found[0].terminated
    for lane in found:
        episodes.end(lane, evaluates=lane == 0)
    assert episodes.evaluates.tolist() == [True, False, False]
    rows.terminated[:], rows.valid[:] = False, [False, False, True]
    assert episodes.step(np.zeros(3, np.int64), 7, rows) == []
    rows.valid[:], rows.truncated[2] = True, True
    (last,) = episodes.step(np.zeros(3, np.int64), 7, rows)
    assert last.env == 2 and last.episode_length == 2 and last.reward.tolist() == [1.0, 1.0]
