"""n-step transitions against a loop over every environment and step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.replay.layout import ReplayError
from echelon.replay.nstep import NStep

Array = np.ndarray[Any, Any]


class Steps:
    """T steps of K environments under NEXT_STEP autoreset; some are replaced in the middle, as after an error."""

    def __init__(self, seed: int, num_steps: int, num_envs: int) -> None:
        rng = np.random.default_rng(seed)
        shape = (num_steps, num_envs)
        self.observation = np.arange((num_steps + 1) * num_envs).reshape(num_steps + 1, num_envs)
        self.reward = rng.normal(size=shape).astype(np.float32)
        self.terminated, self.truncated = rng.random(shape) < 0.15, rng.random(shape) < 0.1
        self.valid = rng.random(shape) > 0.05
        for t in range(num_steps):
            ended = self.terminated[t - 1] | self.truncated[t - 1] if t else np.zeros(num_envs, np.bool_)
            self.valid[t] &= ~ended
            for rows in (self.terminated, self.truncated):
                rows[t] &= self.valid[t]
            self.reward[t][~self.valid[t]] = 0.0


def by_loop(steps: Steps, env: int, n: int, gamma: float) -> list[tuple[int, float, float, int]]:
    """(first observation, reward, discount, next observation) of one environment, in order."""
    found = []
    num_steps = len(steps.reward)
    for t in range(num_steps):
        if not steps.valid[t, env]:
            continue
        reward = 0.0
        for m in range(n):
            if t + m == num_steps or not steps.valid[t + m, env]:
                break  # still open, or restarted without an end
            reward += gamma**m * float(steps.reward[t + m, env])
            terminated, truncated = steps.terminated[t + m, env], steps.truncated[t + m, env]
            if terminated or truncated or m == n - 1:
                discount = 0.0 if terminated else gamma ** (m + 1)
                found.append((int(steps.observation[t, env]), reward, discount, int(steps.observation[t + m + 1, env])))
                break
    return found


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_steps=st.integers(1, 40),
    num_envs=st.integers(1, 4),
    n=st.integers(1, 6),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
)
def test_it_gives_what_a_loop_gives(seed: int, num_steps: int, num_envs: int, n: int, gamma: float) -> None:
    steps = Steps(seed, num_steps, num_envs)
    builder = NStep(num_envs, n, gamma)
    found: list[list[tuple[int, float, float, int]]] = [[] for _ in range(num_envs)]
    for t in range(num_steps):
        start = {"observation": steps.observation[t], "twice": np.stack([steps.observation[t]] * 2, 1)}
        ready = builder.push(start, steps.reward[t], (steps.terminated[t], steps.truncated[t]), steps.valid[t])
        assert ready.reward.dtype == ready.discount.dtype == np.float32
        for i, env in enumerate(ready.envs.tolist()):
            first = int(ready.start["observation"][i])
            assert ready.start["twice"][i].tolist() == [first, first]
            last = int(steps.observation[t + 1, env])
            found[env].append((first, float(ready.reward[i]), float(ready.discount[i]), last))
    for env in range(num_envs):
        expected = by_loop(steps, env, n, gamma)
        assert [row[0] for row in found[env]] == [row[0] for row in expected]
        assert [row[3] for row in found[env]] == [row[3] for row in expected]
        np.testing.assert_allclose([row[1:3] for row in found[env]], [row[1:3] for row in expected], atol=1e-5)


def test_a_truncated_episode_keeps_its_discount_and_a_terminated_one_does_not() -> None:
    builder = NStep(2, 3, 0.5)
    no, yes = np.zeros(2, np.bool_), np.ones(2, np.bool_)
    start = {"observation": np.array([10, 20])}
    assert len(builder.push(start, np.ones(2), (no, no), yes).envs) == 0
    ends = (np.array([True, False]), np.array([False, True]))
    ready = builder.push({"observation": np.array([11, 21])}, np.ones(2), ends, yes)
    assert ready.start["observation"].tolist() == [10, 20, 11, 21] and ready.envs.tolist() == [0, 1, 0, 1]
    assert ready.reward.tolist() == [1.5, 1.5, 1.0, 1.0] and ready.discount.tolist() == [0.0, 0.25, 0.0, 0.5]


def test_cleared_transitions_are_forgotten() -> None:
    builder = NStep(1, 2, 1.0)
    no, yes = np.zeros(1, np.bool_), np.ones(1, np.bool_)
    builder.push({"o": np.array([1])}, np.ones(1), (no, no), yes)
    builder.clear()
    assert len(builder.push({"o": np.array([2])}, np.ones(1), (no, no), yes).envs) == 0
    assert builder.push({"o": np.array([3])}, np.ones(1), (no, no), yes).start["o"].tolist() == [2]


@pytest.mark.parametrize(("n", "gamma"), [(0, 0.9), (1, 1.1), (1, float("nan"))])
def test_numbers_that_cannot_be_are_refused(n: int, gamma: float) -> None:
    with pytest.raises(ReplayError, match="use 1 or more steps, and a discount from 0 to 1"):
        NStep(1, n, gamma)
