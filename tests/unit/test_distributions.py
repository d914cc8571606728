"""Distributions against torch.distributions, by their frequencies, and under masks."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, distributions

from echelon.errors import ConfigError
from echelon.objectives.distributions import Distribution, make_distribution

NVEC = [3, 2, 5]
SPACES: dict[str, gym.Space] = {
    "discrete": gym.spaces.Discrete(4),
    "multi": gym.spaces.MultiDiscrete(NVEC),
    "multi_equal": gym.spaces.MultiDiscrete([3, 3]),
    "box": gym.spaces.Box(-2.0, 2.0, (3,)),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(name: str) -> tuple[Distribution, Tensor]:
    distribution = make_distribution(SPACES[name])
    return distribution, torch.randn(6, 2, distribution.num_params, generator=seeded(1))


def reference(name: str, params: Tensor) -> list[distributions.Distribution]:
    """The independent components, by torch."""
    if name == "box":
        mean, log_std = params.chunk(2, -1)
        return [distributions.Independent(distributions.Normal(mean, log_std.exp()), 1)]
    sizes = {"discrete": [4], "multi": NVEC, "multi_equal": [3, 3]}[name]
    return [distributions.Categorical(logits=logits) for logits in params.split(sizes, -1)]


@pytest.mark.parametrize("name", SPACES)
def test_log_prob_and_entropy_match_torch(name: str) -> None:
    distribution, params = make(name)
    sample = distribution.sample(params, seeded())
    parts = reference(name, params)
    actions = sample.action.unbind(-1) if name.startswith("multi") else [sample.action]
    expected = sum(part.log_prob(action) for part, action in zip(parts, actions, strict=True))
    torch.testing.assert_close(sample.log_prob, expected)
    torch.testing.assert_close(distribution.log_prob(params, sample.action), expected)
    torch.testing.assert_close(distribution.entropy(params), sum(part.entropy() for part in parts))


@pytest.mark.parametrize("name", SPACES)
def test_sampling_uses_only_the_generator_given(name: str) -> None:
    distribution, params = make(name)
    before = torch.random.get_rng_state()
    first, second, other = (distribution.sample(params, seeded(seed)).action for seed in (3, 3, 4))
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("name", SPACES)
def test_mode_is_the_most_likely(name: str) -> None:
    distribution, params = make(name)
    best = distribution.log_prob(params, distribution.mode(params))
    for seed in range(30):
        assert (distribution.sample(params, seeded(seed)).log_prob <= best).all()


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_categorical_frequencies() -> None:
    logits = torch.tensor([0.0, 1.0, -2.0, 0.5])
    sample = make_distribution(SPACES["discrete"]).sample(logits.expand(20_000, 4), seeded())
    counts = torch.bincount(sample.action, minlength=4)
    assert chi_square(counts, logits.softmax(-1)) < 21.1  # 3 degrees of freedom, p = 1e-4


def test_multi_categorical_frequencies() -> None:
    distribution = make_distribution(SPACES["multi"])
    params = torch.randn(10, generator=seeded(5))
    action = distribution.sample(params.expand(20_000, 10), seeded()).action
    joint = (action[:, 0] * 2 + action[:, 1]) * 5 + action[:, 2]
    a, b, c = (logits.softmax(-1) for logits in params.split(NVEC))
    probabilities = (a[:, None, None] * b[None, :, None] * c[None, None, :]).flatten()
    assert chi_square(torch.bincount(joint, minlength=30), probabilities) < 66.2  # 29 degrees of freedom, p = 1e-4


def test_gaussian_frequencies() -> None:
    distribution = make_distribution(gym.spaces.Box(-1.0, 1.0, (1,)))
    params = torch.tensor([0.7, math.log(0.5)])
    action = distribution.sample(params.expand(20_000, 2), seeded()).action[:, 0]
    quantiles = distributions.Normal(0.7, 0.5).icdf(torch.linspace(0, 1, 11)[1:-1])
    counts = torch.bincount(torch.bucketize(action, quantiles), minlength=10)
    assert chi_square(counts, torch.full((10,), 0.1)) < 33.7  # 9 degrees of freedom, p = 1e-4


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64])
def test_masked_categorical_is_the_categorical_of_what_is_allowed(dtype: torch.dtype) -> None:
    distribution = make_distribution(SPACES["discrete"])
    logits = torch.tensor([50.0, 1.0, -1.0, 0.0]).expand(500, 4)
    mask = torch.tensor([0, 1, 0, 1]).to(dtype).expand(500, 4)
    sample = distribution.sample(logits, seeded(), mask)
    assert set(sample.action.tolist()) == {1, 3}
    allowed = distributions.Categorical(logits=torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(sample.log_prob, allowed.log_prob((sample.action == 3).long()))
    torch.testing.assert_close(distribution.entropy(logits, mask), allowed.entropy().expand(500))
    assert (distribution.mode(logits, mask) == 1).all()


def test_masks_cover_the_components_side_by_side() -> None:
    distribution, params = make("multi")
    mask = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1, 0, 0], dtype=torch.bool).expand_as(params)
    for seed in range(20):
        action = distribution.sample(params, seeded(seed), mask).action
        assert (action[..., 0] == 2).all() and (action[..., 1] == 0).all()
        assert ((action[..., 2] == 1) | (action[..., 2] == 2)).all()
    choice = distributions.Categorical(logits=params[..., 6:8])
    torch.testing.assert_close(distribution.entropy(params, mask), choice.entropy())


@pytest.mark.parametrize("name", ["discrete", "multi", "multi_equal"])
def test_a_row_that_allows_nothing_counts_as_unmasked(name: str) -> None:
    distribution, params = make(name)
    nothing = torch.zeros_like(params, dtype=torch.bool)
    got, expected = distribution.sample(params, seeded(), nothing), distribution.sample(params, seeded())
    assert torch.equal(got.action, expected.action) and torch.equal(got.log_prob, expected.log_prob)
    torch.testing.assert_close(distribution.entropy(params, nothing), distribution.entropy(params))


@pytest.mark.parametrize("name", ["discrete", "multi"])
def test_gradients_under_a_mask_are_finite_and_spare_the_forbidden(name: str) -> None:
    distribution, params = make(name)
    params.requires_grad_()
    mask = torch.ones_like(params, dtype=torch.bool)
    mask[..., 1] = False
    action = distribution.sample(params.detach(), seeded(), mask).action
    (distribution.log_prob(params, action, mask).sum() + distribution.entropy(params, mask).sum()).backward()
    assert params.grad is not None and params.grad.isfinite().all()
    assert (params.grad[..., 1] == 0).all() and (params.grad[..., 0] != 0).any()


@pytest.mark.parametrize("name", ["discrete", "multi"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lower_precision_parameters_give_finite_float32(name: str, dtype: torch.dtype) -> None:
    distribution, params = make(name)
    mask = torch.ones_like(params, dtype=torch.bool)
    mask[..., 0] = False
    sample = distribution.sample(params.to(dtype), seeded(), mask)
    entropy = distribution.entropy(params.to(dtype), mask)
    assert sample.log_prob.dtype == entropy.dtype == torch.float32
    assert sample.log_prob.isfinite().all() and entropy.isfinite().all()


def test_to_env_honours_start() -> None:
    discrete = make_distribution(gym.spaces.Discrete(3, start=-1))
    assert discrete.to_env(np.array([0, 1, 2])).tolist() == [-1, 0, 1]
    multi = make_distribution(gym.spaces.MultiDiscrete([2, 2], start=[5, 7]))
    assert multi.to_env(np.array([[0, 1]])).tolist() == [[5, 8]]


def test_to_env_scales_bounded_components_and_clips_the_others() -> None:
    low, high = np.array([-2, 0, -np.inf, 3], np.float32), np.array([2, 10, np.inf, np.inf], np.float32)
    distribution = make_distribution(gym.spaces.Box(low, high))
    env = distribution.to_env(np.array([[0, 0, 100, 1], [5, 1, -100, 4], [-0.5, -9, 0, 3]], np.float32))
    assert env.dtype == np.float32
    assert env.tolist() == [[0, 5, 100, 3], [2, 10, -100, 4], [-1, 0, 0, 3]]


def test_to_env_never_leaves_the_space() -> None:
    rng = np.random.default_rng(0)
    low = rng.normal(size=50).astype(np.float32)
    space = gym.spaces.Box(low, low + rng.exponential(size=50).astype(np.float32))
    actions = make_distribution(space).to_env(rng.normal(size=(100, 50)).astype(np.float32) * 3)
    assert all(space.contains(action) for action in actions)


def test_a_space_no_policy_fills_is_refused() -> None:
    with pytest.raises(ConfigError, match="MultiBinary"):
        make_distribution(gym.spaces.MultiBinary(3))
