"""Losses against worked examples and numpy over the valid entries."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from echelon.objectives import policy_gradient as losses

VALID = torch.tensor([[True, False, True], [True, True, False]])


def normal(seed: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))


def test_masked_mean_and_normalize_match_numpy() -> None:
    x = normal(0)
    kept = x[VALID].numpy()
    assert losses.masked_mean(x, VALID).item() == pytest.approx(kept.mean(), rel=1e-6)
    got = losses.masked_normalize(x, VALID)
    np.testing.assert_allclose(got[VALID].numpy(), (kept - kept.mean()) / kept.std(), rtol=1e-4)
    assert (got[~VALID] == 0).all()


def test_normalizing_equal_entries_gives_zero() -> None:
    assert (losses.masked_normalize(torch.full((2, 3), 7.0), VALID) == 0).all()


def test_policy_gradient_loss_and_its_gradient() -> None:
    log_prob, advantage = normal(1).requires_grad_(), normal(2).requires_grad_()
    loss = losses.policy_gradient_loss(log_prob, advantage, VALID)
    loss.backward()
    assert loss.item() == pytest.approx(-(log_prob * advantage)[VALID].mean().item(), rel=1e-6)
    assert log_prob.grad is not None and advantage.grad is None
    torch.testing.assert_close(log_prob.grad, torch.where(VALID, -advantage.detach() / 4, 0.0))


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "has_gradient"),
    [
        (1.1, 2.0, -2.2, True),  # within the clip
        (1.5, 2.0, -2.4, False),  # too far up, and better: held at 1.2
        (0.5, 2.0, -1.0, True),  # too far down, and worse: free to return
        (0.5, -2.0, 1.6, False),
        (1.5, -2.0, 3.0, True),
    ],
)
def test_clipped_surrogate_cases(ratio: float, advantage: float, expected: float, has_gradient: bool) -> None:
    log_prob = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    behaviour, valid = torch.tensor([-1.0]), torch.tensor([True])
    loss = losses.clipped_surrogate(log_prob, behaviour, torch.tensor([advantage]), valid, 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert log_prob.grad is not None and (log_prob.grad.item() != 0) == has_gradient


@pytest.mark.parametrize(
    ("rho", "low", "high"),
    [
        (1.0, 0.8, 1.2),  # no lag: PPO's range
        (1.25, 0.8, 1.12),  # 1.4 / 1.25
        (0.625, 0.96, 1.2),  # 0.6 / 0.625
        (3.0, 0.8, 0.8),  # too far already
        (0.1, 1.2, 1.2),
        (1e-30, 1.2, 1.2),
    ],
)
def test_decoupled_ranges(rho: float, low: float, high: float) -> None:
    found = losses.decoupled_range(torch.tensor([rho]).log(), 0.2)
    assert [bound.item() for bound in found] == pytest.approx([low, high])
    for clip in (0.5, 0.9):
        assert all(torch.isfinite(bound).all() for bound in losses.decoupled_range(torch.tensor([rho]).log(), clip))


def test_value_losses_match_their_formulas() -> None:
    value, old, target = normal(3), normal(4), normal(5)
    got = losses.value_loss(value, target, VALID).item()
    assert got == pytest.approx(0.5 * (value - target)[VALID].square().mean().item(), rel=1e-6)
    v, o, g = (x[VALID].numpy() for x in (value, old, target))
    near = o + np.clip(v - o, -0.3, 0.3)
    expected = 0.5 * np.maximum((v - g) ** 2, (near - g) ** 2).mean()
    assert losses.clipped_value_loss(value, old, target, VALID, 0.3).item() == pytest.approx(expected, rel=1e-5)


def test_minimising_the_entropy_loss_raises_the_entropy() -> None:
    entropy = normal(6).requires_grad_()
    losses.entropy_loss(entropy, VALID).backward()
    assert entropy.grad is not None
    torch.testing.assert_close(entropy.grad, torch.where(VALID, -0.25, 0.0))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "policy_gradient": lambda x, valid: losses.policy_gradient_loss(x, normal(1), valid),
    "surrogate": lambda x, valid: losses.clipped_surrogate(x, normal(1), normal(2), valid, 0.2),
    "decoupled": lambda x, valid: losses.decoupled_surrogate(x, normal(1), normal(3), normal(2), valid, 0.2),
    "value": lambda x, valid: losses.value_loss(x, normal(1), valid),
    "clipped_value": lambda x, valid: losses.clipped_value_loss(x, normal(1), normal(2), valid, 0.2),
    "entropy": lambda x, valid: losses.entropy_loss(x, valid),
    "normalize": lambda x, valid: losses.masked_normalize(x.detach(), valid).sum() + 0.0 * x[valid].sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_valid_gives_zero(name: str) -> None:
    x = normal(7).requires_grad_()
    loss = LOSSES[name](x, torch.zeros(2, 3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0.0 and x.grad is not None and (x.grad == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_not_valid_has_neither_value_nor_gradient(name: str) -> None:
    x = normal(8)
    wild = torch.where(VALID, x, 1e4).requires_grad_()
    loss = LOSSES[name](wild, VALID)
    loss.backward()
    torch.testing.assert_close(loss, LOSSES[name](x, VALID))
    assert wild.grad is not None and wild.grad.isfinite().all() and (wild.grad[~VALID] == 0).all()


def test_losses_take_any_shape() -> None:
    flat = losses.value_loss(normal(1).flatten(), normal(2).flatten(), VALID.flatten())
    torch.testing.assert_close(flat, losses.value_loss(normal(1), normal(2), VALID))
