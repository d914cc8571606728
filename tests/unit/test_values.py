"""Action values against closed forms and worked examples; the distributions of value-based algorithms."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from echelon.errors import ConfigError
from echelon.objectives.distributions import Deterministic, Greedy, SquashedGaussian, forbid, make_distribution
from echelon.objectives.values import (
    PRIORITY_FLOOR,
    clipped_double_targets,
    double_q_errors,
    expected_soft_value,
    huber_loss,
    initial_priorities,
    priorities,
    smoothed_actions,
    soft_targets,
    temperature_loss,
)

BOX = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_double_q_chooses_with_one_network_and_values_with_the_other() -> None:
    q = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
    online, target = (
        torch.tensor([[0.0, 9.0], [9.0, 0.0], [9.0, 0.0]]),
        torch.tensor([[7.0, 3.0], [2.0, 8.0], [1.0, 0.0]]),
    )
    reward, discount = torch.tensor([1.0, 1.0, 10.0]), torch.tensor([0.5, 0.9, 0.0])  # the last one terminated
    error = double_q_errors(
        q, torch.tensor([0, 1, 1]), reward, discount, online.requires_grad_(), target.requires_grad_()
    )
    torch.testing.assert_close(error, torch.tensor([1.0 + 1.5 - 1.0, 1.0 + 1.8 - 4.0, 10.0 - 6.0]))
    error.sum().backward()
    assert q.grad is not None and q.grad.tolist() == [[-1.0, 0.0], [0.0, -1.0], [0.0, -1.0]]
    assert online.grad is None and target.grad is None, "no gradient flows into targets"


def test_q_learning_finds_the_values_of_a_chain() -> None:
    """Three states to the right of each other, 1 at the end, gamma 0.5: 0.25, 0.5, 1; turning back pays nothing."""
    q = torch.zeros(4, 2)
    state, action = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([1, 1, 1, 0, 0, 0])
    after = torch.tensor([1, 2, 3, 3, 3, 3])
    reward = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    discount = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0, 0.0])
    for _ in range(4):
        q[state, action] += double_q_errors(q[state], action, reward, discount, q[after], q[after])
    torch.testing.assert_close(q[:3, 1], torch.tensor([0.25, 0.5, 1.0]))
    assert not q[:, 0].any()


def test_an_n_step_transition_has_the_target_of_n_steps() -> None:
    """Two rewards and gamma^2 before the bootstrap equal one step onto the one-step target."""
    value, gamma = torch.tensor([[4.0]]), 0.9
    one = clipped_double_targets(torch.tensor([3.0]), torch.tensor([gamma]), value)
    nested = clipped_double_targets(torch.tensor([2.0]), torch.tensor([gamma]), one.unsqueeze(0))
    whole = clipped_double_targets(torch.tensor([2.0 + gamma * 3.0]), torch.tensor([gamma**2]), value)
    torch.testing.assert_close(nested, whole)


@pytest.mark.parametrize("delta", [0.5, 1.0, 3.0])
def test_huber_is_torchs_and_weighted(delta: float) -> None:
    error = torch.linspace(-4.0, 4.0, 17, requires_grad=True)
    weight = torch.linspace(0.1, 1.0, 17)
    expected = (torch.nn.functional.huber_loss(error, torch.zeros(17), reduction="none", delta=delta) * weight).mean()
    torch.testing.assert_close(huber_loss(error, weight, delta), expected)
    (found,) = torch.autograd.grad(huber_loss(error, weight, delta), error)
    (wanted,) = torch.autograd.grad(expected, error)
    torch.testing.assert_close(found, wanted)


def test_without_a_bend_the_loss_is_half_the_square_and_critics_add_up() -> None:
    error, weight = torch.tensor([[1.0, -2.0], [3.0, 0.0]]), torch.tensor([1.0, 0.5])
    assert float(huber_loss(error[0], weight, 0.0)) == pytest.approx((0.5 + 0.5 * 2.0) / 2)
    both = huber_loss(error[0], weight, 0.0) + huber_loss(error[1], weight, 0.0)
    assert float(huber_loss(error, weight, 0.0)) == pytest.approx(float(both))


def test_the_lower_critic_counts_and_the_end_has_no_future() -> None:
    q = torch.tensor([[5.0, 1.0, 9.0], [4.0, 2.0, 9.0]], requires_grad=True)
    target = clipped_double_targets(torch.ones(3), torch.tensor([0.9, 0.9, 0.0]), q)
    torch.testing.assert_close(target, torch.tensor([1.0 + 3.6, 1.9, 1.0]))
    assert not target.requires_grad


def test_a_soft_target_adds_the_entropy_of_what_follows() -> None:
    q, log_prob = torch.tensor([[5.0, 1.0], [4.0, 2.0]]), torch.tensor([-2.0, 0.5])
    target = soft_targets(torch.ones(2), torch.tensor([0.9, 0.0]), q, log_prob, torch.tensor(0.5))
    torch.testing.assert_close(target, torch.tensor([1.0 + 0.9 * (4.0 + 1.0), 1.0]))


def test_the_soft_value_of_the_best_discrete_policy_is_a_log_sum_exp() -> None:
    """Of all policies the softmax of q / temperature has the highest soft value: temperature * logsumexp."""
    q, temperature = torch.tensor([[[1.0, 2.0, 4.0]]]), torch.tensor(0.7)
    best = torch.log_softmax(q[0] / temperature, -1)
    value = expected_soft_value(q, best, temperature)
    torch.testing.assert_close(value, temperature * torch.logsumexp(q[0] / temperature, -1))
    other = expected_soft_value(q, torch.log_softmax(torch.tensor([[0.0, 1.0, 2.0]]), -1), temperature)
    assert float(other) < float(value)
    lower = torch.cat((q, q - 1.0))
    torch.testing.assert_close(expected_soft_value(lower, best, temperature), value - 1.0)


@pytest.mark.parametrize(("log_prob", "sign"), [(3.0, 1), (-3.0, -1)])
def test_the_temperature_rises_while_the_entropy_is_too_low(log_prob: float, sign: int) -> None:
    """Entropy -3 is below the target of 1, entropy 3 above it."""
    log_temperature = torch.tensor(math.log(0.2), requires_grad=True)
    log_probs = torch.full((4,), log_prob, requires_grad=True)
    temperature_loss(log_temperature, log_probs, 1.0).backward()
    assert log_temperature.grad is not None and log_probs.grad is None
    assert float(log_temperature.grad) == pytest.approx(-0.2 * (log_prob + 1.0))
    assert -float(log_temperature.grad) * sign > 0


def test_smoothing_stays_near_the_action_and_within_bounds() -> None:
    action = torch.cat((torch.zeros(5_000, 1), torch.full((5_000, 1), 0.95)))
    smooth = smoothed_actions(action, 0.4, 0.5, generator())
    assert float((smooth - action).abs().max()) <= 0.5 and float(smooth.max()) == 1.0
    drawn = smooth[:5_000]
    # A normal clipped at 1.25 of its deviations has a deviation of sqrt(E[min(z^2, 1.25^2)]) = 0.8255 of it.
    assert float(drawn.std()) == pytest.approx(0.4 * 0.8255, rel=0.03) and abs(float(drawn.mean())) < 0.02
    assert smoothed_actions(action, 0.0, 0.5, generator()) is action


def test_priorities_are_sizes_of_errors_and_never_nothing() -> None:
    error = torch.tensor([[1.0, -3.0, 0.0], [3.0, -1.0, 0.0]], requires_grad=True)
    torch.testing.assert_close(priorities(error), torch.tensor([2.0, 2.0, 0.0]) + PRIORITY_FLOOR)
    torch.testing.assert_close(priorities(error[0]), torch.tensor([1.0, 3.0, 0.0]) + PRIORITY_FLOOR)
    assert not priorities(error).requires_grad and bool((priorities(error) > 0).all())


@pytest.mark.parametrize("make", [torch.tensor, lambda values: np.array(values, np.float32)])
def test_an_actor_gives_the_priority_that_the_learner_would(make: Any) -> None:
    """With one network for everything they agree."""
    q, after = torch.tensor([[1.0, 2.0], [0.5, 0.0]]), torch.tensor([[3.0, 5.0], [1.0, 0.0]])
    reward, discount, action = [1.0, -2.0], [0.9, 0.0], torch.tensor([1, 0])
    error = double_q_errors(q, action, torch.tensor(reward), torch.tensor(discount), after, after)
    found = initial_priorities(make([2.0, 0.5]), make(reward), make(discount), make([5.0, 1.0]))
    assert type(found) is type(make([0.0]))
    np.testing.assert_allclose(np.asarray(found), priorities(error).numpy(), rtol=1e-6)


def test_greedy_takes_the_best_allowed_choice_and_random_any_allowed() -> None:
    greedy = make_distribution(gym.spaces.Discrete(3, start=5), "greedy")
    assert isinstance(greedy, Greedy)
    q = torch.tensor([[1.0, 3.0, 2.0]]).repeat(3_000, 1)
    mask = torch.tensor([[1, 0, 1]]).repeat(3_000, 1)
    assert greedy.mode(q[:1]).tolist() == [1] and greedy.mode(q[:1], mask[:1]).tolist() == [2]
    assert greedy.mode(q[:1], torch.zeros(1, 3)).tolist() == [1], "a mask that allows nothing is none"
    sample = greedy.sample(q, generator(), mask)
    assert set(sample.action.tolist()) == {2} and not sample.log_prob.any()
    counts = torch.bincount(greedy.random(q, generator(), mask), minlength=3).tolist()
    assert counts[1] == 0 and abs(counts[0] - 1_500) < 150
    assert greedy.to_env(np.array([2])).tolist() == [7]
    assert float(forbid(q[:1], mask[:1])[0, 1]) < -1e8


def test_a_deterministic_action_lies_within_the_bounds() -> None:
    policy = make_distribution(BOX, "deterministic")
    assert type(policy) is Deterministic and policy.num_params == 2
    params = torch.tensor([[0.0, 0.0], [100.0, -100.0]])
    torch.testing.assert_close(policy.mode(params), torch.tensor([[0.0, 0.0], [1.0, -1.0]]))
    assert policy.to_env(policy.mode(params).numpy()).tolist() == [[0.0, 5.0], [2.0, 0.0]]
    drawn = policy.random(torch.zeros(4_000, 2), generator())
    assert drawn.shape == (4_000, 2) and float(drawn.abs().max()) <= 1.0
    assert float(drawn.var()) == pytest.approx(1.0 / 3.0, rel=0.05)


def squashed() -> SquashedGaussian:
    distribution = make_distribution(BOX, "squashed")
    assert isinstance(distribution, SquashedGaussian)
    return distribution


def reference(params: Tensor) -> Any:
    """The same law by torch.distributions."""
    mean, raw = params.double().chunk(2, -1)
    std = (-5.0 + 3.5 * (torch.tanh(raw) + 1.0)).exp()
    normal = torch.distributions.Normal(mean, std)
    tanh = torch.distributions.TanhTransform(cache_size=1)
    return torch.distributions.Independent(torch.distributions.TransformedDistribution(normal, tanh), 1)


def test_a_squashed_sample_has_the_density_of_the_transformed_normal() -> None:
    params = torch.randn(500, 4, generator=generator(1))
    sample = squashed().sample(params, generator(2))
    assert float(sample.action.abs().max()) <= 1.0
    inside = (sample.action.abs() < 0.999).all(-1)  # beyond that the reference has no digits left
    expected = reference(params).log_prob(sample.action.double())
    torch.testing.assert_close(sample.log_prob[inside].double(), expected[inside], rtol=1e-3, atol=2e-3)
    again = squashed().log_prob(params, sample.action)
    torch.testing.assert_close(again[inside], sample.log_prob[inside], rtol=1e-3, atol=2e-3)


def test_the_density_of_the_squashed_normal_adds_up_to_one() -> None:
    distribution = SquashedGaussian(gym.spaces.Box(-3.0, 3.0, (1,)))
    edges = torch.linspace(-1.0, 1.0, 200_001)
    middle = ((edges[1:] + edges[:-1]) / 2).unsqueeze(-1)
    for params in ([0.0, 0.0], [1.5, 0.3], [-0.5, -0.6]):
        density = distribution.log_prob(torch.tensor(params).expand(len(middle), 2), middle).double().exp()
        assert float(density.sum() * 1e-5) == pytest.approx(1.0, abs=2e-3)


def test_actions_at_the_bounds_and_far_means_are_finite_with_gradients() -> None:
    distribution = squashed()
    params = torch.tensor([[0.0, 0.0, 0.0, 0.0], [50.0, -50.0, 9.0, -9.0]], requires_grad=True)
    action = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    log_prob = distribution.log_prob(params, action)
    sample = distribution.sample(params, generator())
    assert bool(torch.isfinite(log_prob).all()) and bool(torch.isfinite(sample.log_prob).all())
    (log_prob.sum() + sample.log_prob.sum() + sample.action.sum()).backward()
    assert params.grad is not None and bool(torch.isfinite(params.grad).all())
    assert distribution.to_env(action.numpy()).tolist() == [[2.0, 0.0], [-2.0, 10.0]]


def test_a_squashed_sample_is_reparameterised() -> None:
    """d a / d mean = 1 - a^2, for the same draw."""
    params = torch.zeros(1, 4, requires_grad=True)
    sample = squashed().sample(params, generator(3))
    sample.action[0, 0].backward()
    assert params.grad is not None
    torch.testing.assert_close(params.grad[0, 0], 1.0 - sample.action.detach()[0, 0] ** 2)
    assert float(params.grad[0, 2]) != 0.0 and float(params.grad[0, 1]) == 0.0


def test_the_squashed_entropy_is_the_mean_of_minus_log_prob() -> None:
    params = torch.tensor([[0.3, -0.8, 0.2, -0.3]])
    sample = squashed().sample(params.expand(200_000, -1), generator(4))
    assert float(squashed().entropy(params)) == pytest.approx(-float(sample.log_prob.mean()), abs=0.02)


UNFIT = [
    ("greedy", BOX, "supports Discrete action spaces"),
    ("greedy", gym.spaces.MultiDiscrete([2, 3]), "supports Discrete action spaces"),
    ("deterministic", gym.spaces.Discrete(2), "supports bounded Box action spaces"),
    ("squashed", gym.spaces.MultiDiscrete([2, 3]), "supports bounded Box and Discrete action spaces"),
    ("squashed", gym.spaces.Box(-np.inf, np.inf, (2,)), r"no bounds in components \[0, 1\]"),
]


@pytest.mark.parametrize(("kind", "space", "message"), UNFIT)
def test_a_space_that_does_not_fit_is_refused_with_the_remedy(kind: Any, space: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}.*impala"):
        make_distribution(space, kind)
