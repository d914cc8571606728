"""Losses: scalars to minimise, averaged over the valid entries only.

Every tensor of a call has the same shape, whatever it is; `valid` is boolean. Entries that are not valid give neither
value nor gradient, even where they hold infinities; a batch without a valid entry gives 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """The mean of the valid entries of `x`; 0 if there is none."""
    return torch.where(valid, x, 0.0).sum() / valid.sum().clamp(min=1)


def masked_normalize(x: Tensor, valid: Tensor, epsilon: float = 1e-8) -> Tensor:
    """`x` shifted and scaled to mean 0 and standard deviation 1 over its valid entries; 0 at the others."""
    centred = torch.where(valid, x - masked_mean(x, valid), 0.0)
    variance = masked_mean(centred.square(), valid)
    return centred / (variance.sqrt() + epsilon)


def policy_gradient_loss(log_prob: Tensor, advantage: Tensor, valid: Tensor) -> Tensor:
    """The score-function policy-gradient loss; no gradient flows into `advantage`."""
    return -masked_mean(log_prob * advantage.detach(), valid)


def clipped_surrogate(
    log_prob: Tensor, behaviour_log_prob: Tensor, advantage: Tensor, valid: Tensor, clip: float
) -> Tensor:
    """PPO's clipped surrogate loss (Schulman et al., 2017, eq. 7); no gradient flows into `advantage`."""
    advantage = advantage.detach()
    # Masked before exp: the gradient of an infinite ratio would be 0 * inf at an invalid entry.
    ratio = torch.where(valid, log_prob - behaviour_log_prob.detach(), 0.0).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage)
    return -masked_mean(surrogate, valid)


def value_loss(value: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """Half the squared error to `target`, into which no gradient flows."""
    return 0.5 * masked_mean((value - target.detach()).square(), valid)


def clipped_value_loss(value: Tensor, old_value: Tensor, target: Tensor, valid: Tensor, clip: float) -> Tensor:
    """Half the larger of two squared errors: of the value, and of the value kept within `clip` of `old_value`."""
    target, old_value = target.detach(), old_value.detach()
    near = old_value + (value - old_value).clamp(-clip, clip)
    worse = torch.maximum((value - target).square(), (near - target).square())
    return 0.5 * masked_mean(worse, valid)


def entropy_loss(entropy: Tensor, valid: Tensor) -> Tensor:
    """The negative mean entropy: minimising it keeps the policy exploring."""
    return -masked_mean(entropy, valid)
