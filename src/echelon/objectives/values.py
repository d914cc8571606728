"""Action values: targets, TD errors and losses of algorithms that learn from single (n-step) transitions.

`discount_B` is gamma**n, or 0 where the episode terminated; a truncated step keeps its discount, so it still
bootstraps. No gradient flows through a target.

Shapes: B transitions, A actions, N critics.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Values = TypeVar("Values", Tensor, np.ndarray[Any, Any])
PRIORITY_FLOOR = 1e-6  # so that a transition without TD error can still be sampled


@torch.no_grad()
def double_q_targets(reward_B: Tensor, discount_B: Tensor, next_online_BA: Tensor, next_target_BA: Tensor) -> Tensor:
    """Returns targets of Double Q-learning (van Hasselt et al., 2016): one network selects, the other evaluates.

    If both next values are the target network's, these are the targets of plain Q-learning. The caller masks
    `next_online_BA`, so that its best action is allowed.
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
    """Returns the TD errors of Double Q-learning: targets minus the values of the actions taken."""
    target_B = double_q_targets(reward_B, discount_B, next_online_BA, next_target_BA)
    return target_B - q_BA.gather(-1, action_B.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def clipped_double_targets(reward_B: Tensor, discount_B: Tensor, next_q_NB: Tensor) -> Tensor:
    """Returns targets from the minimum of N critics (Fujimoto et al., 2018, eq. 10); with one critic, DDPG's."""
    return torch.addcmul(reward_B, discount_B, next_q_NB.amin(0))


@torch.no_grad()
def soft_targets(
    reward_B: Tensor, discount_B: Tensor, next_q_NB: Tensor, next_log_prob_B: Tensor, temperature: Tensor
) -> Tensor:
    """Returns targets of soft actor-critic (Haarnoja et al., 2018, eq. 3 and 5), from the minimum of N critics.

    Only the bootstrap value includes the entropy: the entropies of the n steps in between are not known.
    """
    soft_value_B = next_q_NB.amin(0) - temperature * next_log_prob_B
    return torch.addcmul(reward_B, discount_B, soft_value_B)


def expected_soft_value(q_NBA: Tensor, log_p_BA: Tensor, temperature: Tensor) -> Tensor:
    """Returns the soft value of discrete actions, as an expectation over them (Christodoulou, 2019, eq. 10)."""
    return (log_p_BA.exp() * (q_NBA.amin(0) - temperature * log_p_BA)).sum(-1)


@torch.no_grad()
def smoothed_actions(action: Tensor, noise: float, clip: float, generator: torch.Generator) -> Tensor:
    """Target policy smoothing (Fujimoto et al., 2018, eq. 14): adds clipped noise to actions in [-1, 1]."""
    if noise == 0:
        return action
    drawn = torch.empty_like(action).normal_(generator=generator).mul_(noise).clamp_(-clip, clip)
    return drawn.add_(action).clamp_(-1.0, 1.0)


def huber_loss(error_B: Tensor, weight_B: Tensor, delta: float) -> Tensor:
    """Returns the weighted mean Huber loss: quadratic within `delta`, linear beyond; `delta=0`: quadratic everywhere.

    The losses of N critics (N, B) are summed.
    """
    if delta == 0:
        loss_B = 0.5 * error_B.square()
    else:
        size_B = error_B.abs()
        near_B = size_B.clamp(max=delta)
        loss_B = near_B * (size_B - 0.5 * near_B)
    return (loss_B * weight_B).sum() / weight_B.numel()


def temperature_loss(log_temperature: Tensor, log_prob_B: Tensor, target_entropy: float | Tensor) -> Tensor:
    """Returns the loss of the temperature (Haarnoja et al., 2018, eq. 18).

    Minimising it raises the temperature while the policy's entropy is below `target_entropy`, one for all rows or (B,).
    """
    target = target_entropy.mean() if isinstance(target_entropy, Tensor) else target_entropy
    return -log_temperature.exp() * (log_prob_B.detach().mean() + target)


def priorities(error: Tensor) -> Tensor:
    """Returns priorities: the absolute TD error, averaged over critics if there are several (N, B)."""
    size = error.detach().abs()
    return (size.mean(0) if size.dim() == 2 else size) + PRIORITY_FLOOR


def initial_priorities(chosen: Values, reward: Values, discount: Values, next_best: Values) -> Values:
    """Returns the priorities an actor assigns to new transitions (Horgan et al., 2018), from values it computed to act.

    `chosen` is the value of the action taken, `next_best` the value of the best action n steps later. All are tensors
    or numpy arrays of one shape.
    """
    error: Values = reward + discount * next_best - chosen
    return abs(error) + PRIORITY_FLOOR
