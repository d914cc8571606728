"""Action values: TD errors, targets and losses of rules that learn from single (n-step) transitions.

`discount_B` is gamma**n where the episode goes on and 0 where it terminated; a truncated step keeps its discount, so it
still bootstraps. No gradient flows through any target.

Shapes: B transitions, A actions, N critics.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Values = TypeVar("Values", Tensor, np.ndarray[Any, Any])
PRIORITY_FLOOR = 1e-6  # so that what was predicted exactly can still be drawn


@torch.no_grad()
def double_q_targets(reward_B: Tensor, discount_B: Tensor, next_online_BA: Tensor, next_target_BA: Tensor) -> Tensor:
    """Targets of Double Q-learning (van Hasselt et al., 2016): one network chooses, the other one judges.

    Plain Q-learning's where both next values are the target's. An action that is not allowed next must not be the best
    of `next_online_BA`.
    """
    best_B1 = next_online_BA.argmax(-1, keepdim=True)
    bootstrap_B = next_target_BA.gather(-1, best_B1).squeeze(-1)
    return torch.addcmul(reward_B, discount_B, bootstrap_B)


def double_q_errors(
    q_BA: Tensor,
    action_B: Tensor,
    reward_B: Tensor,
    discount_B: Tensor,
    next_online_BA: Tensor,
    next_target_BA: Tensor,
) -> Tensor:
    """TD errors of Double Q-learning: how far the values of the actions taken are below their targets."""
    target_B = double_q_targets(reward_B, discount_B, next_online_BA, next_target_BA)
    return target_B - q_BA.gather(-1, action_B.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def clipped_double_targets(reward_B: Tensor, discount_B: Tensor, next_q_NB: Tensor) -> Tensor:
    """Targets from the least of N critics (Fujimoto et al., 2018, eq. 10); DDPG's with a single one."""
    return torch.addcmul(reward_B, discount_B, next_q_NB.amin(0))


@torch.no_grad()
def soft_targets(
    reward_B: Tensor, discount_B: Tensor, next_q_NB: Tensor, next_log_prob_B: Tensor, temperature: Tensor
) -> Tensor:
    """Targets of soft actor-critic (Haarnoja et al., 2018, eq. 3 and 5), from the least of N critics.

    Only the value after the n steps carries its entropy: that of the steps between is not known.
    """
    soft_value_B = next_q_NB.amin(0) - temperature * next_log_prob_B
    return torch.addcmul(reward_B, discount_B, soft_value_B)


def expected_soft_value(q_NBA: Tensor, log_p_BA: Tensor, temperature: Tensor) -> Tensor:
    """The soft value of discrete actions, as an expectation over them (Christodoulou, 2019, eq. 10)."""
    return (log_p_BA.exp() * (q_NBA.amin(0) - temperature * log_p_BA)).sum(-1)


@torch.no_grad()
def smoothed_actions(action: Tensor, noise: float, clip: float, generator: torch.Generator) -> Tensor:
    """Target policy smoothing (Fujimoto et al., 2018, eq. 14): clipped noise on actions within -1 and 1."""
    if noise == 0:
        return action
    drawn = torch.empty_like(action).normal_(generator=generator).mul_(noise).clamp_(-clip, clip)
    return drawn.add_(action).clamp_(-1.0, 1.0)


def huber_loss(error_B: Tensor, weight_B: Tensor, delta: float) -> Tensor:
    """The weighted mean of Huber's loss: half the square within `delta`, straight beyond it; 0: the square everywhere.

    Errors of N critics (N, B) give the sum of their losses.
    """
    if delta == 0:
        loss_B = 0.5 * error_B.square()
    else:
        size_B = error_B.abs()
        near_B = size_B.clamp(max=delta)
        loss_B = near_B * (size_B - 0.5 * near_B)
    return (loss_B * weight_B).sum() / weight_B.numel()


def temperature_loss(log_temperature: Tensor, log_prob_B: Tensor, target_entropy: float) -> Tensor:
    """Raises the temperature while the policy's entropy is below `target_entropy` (Haarnoja et al., 2018, eq. 18)."""
    return -log_temperature.exp() * (log_prob_B.detach().mean() + target_entropy)


def priorities(error: Tensor) -> Tensor:
    """How much there is to learn: the size of the TD error, its mean over critics where there are several (N, B)."""
    size = error.detach().abs()
    return (size.mean(0) if size.dim() == 2 else size) + PRIORITY_FLOOR


def initial_priorities(chosen: Values, reward: Values, discount: Values, next_best: Values) -> Values:
    """The priorities that an actor gives its new transitions (Horgan et al., 2018), from values it met while acting.

    `chosen` is the value of the action that was taken, `next_best` that of the best action n steps later; tensors or
    numpy arrays of any one shape.
    """
    error: Values = reward + discount * next_best - chosen
    return abs(error) + PRIORITY_FLOOR
