"""Reward scaling against a running computation per environment."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from echelon.algorithms.actor_critic import EPSILON, RewardScale
from echelon.schema import Batch

DISCOUNT = 0.9
T = 7


def make_batch(columns: list[dict[str, Any]], lanes: list[int]) -> Batch:
    """Columns of rewards and flags as a batch; what rewards do not read is left empty."""
    stacked = {name: torch.from_numpy(np.stack([c[name] for c in columns], 1)) for name in columns[0]}
    empty = torch.zeros(0)
    truncated = torch.zeros_like(stacked["terminated"])
    return Batch(
        empty, action=empty, log_prob=empty, truncated=truncated, state=(), lanes=torch.tensor(lanes), **stacked
    )


class Stream:
    """One environment of the run: episodes of random length, whose discounted returns it keeps by definition."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.begin, self.reset_next, self.rewards = True, False, []  # type: bool, bool, list[float]
        self.seen: list[float] = []

    def column(self) -> dict[str, Any]:
        rows = {"reward": np.zeros(T, np.float32), "terminated": np.zeros(T, bool), "valid": np.ones(T, bool)}
        rows["first"] = np.zeros(T + 1, bool)
        for t in range(T):
            rows["first"][t] = self.begin
            self.begin = False
            if self.reset_next:
                rows["valid"][t], self.reset_next, self.begin, self.rewards = False, False, True, []
                continue
            reward = np.float32(self.draw.normal(1.0, 3.0))
            rows["reward"][t] = reward
            self.rewards.append(float(reward))
            past = reversed(self.rewards)
            self.seen.append(sum(r * DISCOUNT**age for age, r in enumerate(past)))
            if self.draw.random() < 0.25:
                rows["terminated"][t], self.reset_next = True, True
        rows["first"][T] = self.begin
        return rows


def deviation(values: list[float]) -> float:
    return math.sqrt(float(np.var(np.array(values, np.float64))) + EPSILON)


@pytest.mark.parametrize(
    "order",
    [
        [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]],
        [[2, 3], [0, 1], [2, 3, 0, 1], [6, 7]],  # by arrival: an environment not seen before comes late
        [[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 2, 3, 0, 1]],  # several trajectories of one environment in a batch
    ],
)
def test_the_scale_is_the_deviation_of_every_environments_discounted_return(order: list[list[int]]) -> None:
    scale = RewardScale(clip=0.0, normalize=True, discount=DISCOUNT)
    streams = [Stream(seed) for seed in range(8)]
    reward = torch.tensor([[1.0, -2.0]])
    assert torch.equal(scale(reward), reward), "nothing is known yet"
    for lanes in order:
        scale.observe(make_batch([streams[lane].column() for lane in lanes], lanes))
        seen = [value for stream in streams for value in stream.seen]
        assert scale.deviation == pytest.approx(deviation(seen), rel=1e-9)
        torch.testing.assert_close(scale(reward), reward / deviation(seen))


def test_an_actor_that_starts_anew_starts_a_new_return() -> None:
    scale = RewardScale(clip=0.0, normalize=True, discount=DISCOUNT)
    old, new = Stream(1), Stream(2)
    scale.observe(make_batch([old.column()], [0]))
    scale.observe(make_batch([new.column()], [0]))  # the same lane, but its first row is an episode's first
    assert scale.deviation == pytest.approx(deviation(old.seen + new.seen), rel=1e-9)


def test_a_batch_does_not_scale_itself_and_scaled_rewards_are_bounded() -> None:
    scale = RewardScale(clip=0.0, normalize=True, discount=0.0)
    rows = {"reward": np.array([1.0, -1.0] * 3 + [1.0], np.float32), "terminated": np.zeros(T, bool)}
    scale.observe(make_batch([{**rows, "valid": np.ones(T, bool), "first": np.zeros(T + 1, bool)}], [0]))
    assert scale(torch.tensor([1e9, -1e9])).tolist() == [10.0, -10.0]


def test_clipping_and_leaving_alone() -> None:
    reward = torch.tensor([[-3.0, 0.25, 7.0]])
    assert RewardScale(clip=1.0, normalize=False, discount=0.9)(reward).tolist() == [[-1.0, 0.25, 1.0]]
    plain = RewardScale(clip=0.0, normalize=False, discount=0.9)
    plain.observe(make_batch([Stream(0).column()], [0]))
    assert torch.equal(plain(reward), reward) and plain.count == 0.0


def test_its_state_travels() -> None:
    one, stream = RewardScale(clip=0.0, normalize=True, discount=DISCOUNT), Stream(4)
    one.observe(make_batch([stream.column()], [3]))
    other = RewardScale(clip=0.0, normalize=True, discount=DISCOUNT)
    other.load_state_dict(one.state_dict())
    other.observe(make_batch([stream.column()], [3]))
    assert other.deviation == pytest.approx(deviation(stream.seen), rel=1e-9)
