"""Statistics of a minibatch: means over its valid entries, which microbatches and learners sum as they sum losses.

A statistic that is no mean, such as the explained variance, is computed from means (`explained_variance`) when the sums
are read. Shapes are those of `policy_gradient`; no gradient flows through a statistic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

MOMENTS = ("target_mean", "target_square", "error_mean", "error_square")  # of value targets, and of their errors
MIN_VARIANCE = 1e-6  # of targets, relative to their mean square: below, float32 sums do not resolve it


@torch.no_grad()
def masked_means(columns: Mapping[str, Tensor], valid: Tensor) -> dict[str, Tensor]:
    """Returns the mean of the valid entries of each column; 0 if there is none."""
    stacked = torch.stack(list(columns.values())).where(valid, 0.0).flatten(1)
    return dict(zip(columns, (stacked.sum(1) / valid.sum().clamp(min=1)).unbind(), strict=True))


@torch.no_grad()
def value_moments(value: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Returns the columns of MOMENTS for values that predict `target`."""
    error = target - value
    return dict(zip(MOMENTS, (target, target.square(), error, error.square()), strict=True))


def explained_variance(target_mean: float, target_square: float, error_mean: float, error_square: float) -> float:
    """Returns 1 - Var(error) / Var(target): 1 if the values predict the targets, 0 if a constant is as good.

    NaN if the targets do not vary.
    """
    variance = target_square - target_mean**2
    if not variance > MIN_VARIANCE * target_square:
        return math.nan
    return 1.0 - (error_square - error_mean**2) / variance


@torch.no_grad()
def divergence(log_ratio: Tensor) -> Tensor:
    """Returns p/q - 1 - log(p/q) per step, given log(p/q): its mean over the choices of q estimates KL(q || p)."""
    return log_ratio.exp() - 1 - log_ratio
