"""The statistics of minibatches against closed forms: the divergence of policies, the explained variance."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from echelon.objectives.statistics import divergence, explained_variance, masked_means, value_moments
from echelon.roles.loss_account import LossAccount

P, Q = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64), torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)


def test_the_divergence_is_that_of_the_policies() -> None:
    """Over choices in exactly the proportions of q, its mean is KL(q || p)."""
    choice = torch.arange(3).repeat_interleave((100 * Q).long())
    found = divergence((P[choice] / Q[choice]).log()).mean()
    assert float(found) == pytest.approx(float((Q * (Q / P).log()).sum()))
    assert float(divergence(torch.zeros(3)).sum()) == 0.0


@pytest.mark.parametrize("shift", [0.0, -50.0])
def test_the_explained_variance_is_that_of_all_entries_of_all_minibatches(shift: float) -> None:
    rng = np.random.default_rng(0)
    value = rng.normal(shift, 3.0, (4, 5, 8)).astype(np.float32)
    target = (value + rng.normal(0.5, 2.0, value.shape)).astype(np.float32)
    valid = np.ones(value.shape, bool)
    valid[:, 0] = False
    value[~valid] = np.inf
    account = LossAccount()
    for one, wanted, mask in zip(*map(torch.from_numpy, (value, target, valid)), strict=True):  # minibatches
        means = masked_means(value_moments(one, wanted), mask)
        account.note(tuple(means), torch.stack(list(means.values())))
    expected = 1 - np.var(target[valid] - value[valid]) / np.var(target[valid])
    assert account.take() == {"explained_variance": pytest.approx(expected, rel=1e-3)}


def test_the_explained_variance_of_targets_that_do_not_vary_is_not_known() -> None:
    target = torch.full((100,), 123.4)
    means = masked_means(value_moments(torch.randn(100), target), torch.ones(100, dtype=torch.bool))
    assert math.isnan(explained_variance(*map(float, means.values())))
    assert explained_variance(2.0, 5.0, 0.0, 0.0) == 1.0, "exact values"
    assert explained_variance(2.0, 5.0, 3.0, 10.0) == 0.0, "a constant, however wrong"
