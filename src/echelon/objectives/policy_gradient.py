"""Policy gradients: returns, advantages and losses of a batch of trajectories.

Shapes: T steps, X = T + 1 rows (the last is the bootstrap), B lanes. `discount_TB` is gamma, or 0 where the episode
terminated. Autoreset is NEXT_STEP: after an episode ends at step t, row t+1 holds its true last observation and step
t+1 only resets (`valid_TB` is False there). Every backward recursion is cut at invalid steps: a truncated step
bootstraps from the value of its true last observation, and a terminated step does not bootstrap. No gradient flows
through a return or an advantage.

A loss is a scalar to minimise, averaged over the valid entries. All tensors of a call have the same shape. Invalid
entries contribute neither value nor gradient, even if they are infinite. A batch without a valid entry gives 0.

On a CPU the tensors are small, and the cost is the number of operations: everything except the recursion is vectorised
over T, and the recursion is one operation per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VTrace:
    """Value targets and policy-gradient advantages; at invalid steps the target is the value and the advantage 0."""

    target_TB: Tensor
    advantage_TB: Tensor


def _accumulate_(delta_TB: Tensor, decay_TB: Tensor) -> Tensor:
    """Computes acc_t = delta_t + decay_t * acc_{t+1} in place of `delta_TB`."""
    deltas, decays = delta_TB.unbind(), decay_TB.unbind()
    for t in range(len(deltas) - 2, -1, -1):
        deltas[t].addcmul_(decays[t], deltas[t + 1])
    return delta_TB


@torch.no_grad()
def gae(reward_TB: Tensor, discount_TB: Tensor, value_XB: Tensor, valid_TB: Tensor, trace_lambda: float) -> Tensor:
    """Returns generalised advantage estimates (Schulman et al., 2016, eq. 16); 0 at invalid steps."""
    delta_TB = torch.addcmul(reward_TB, discount_TB, value_XB[1:]).sub_(value_XB[:-1])
    invalid_TB = ~valid_TB
    decay_TB = (discount_TB * trace_lambda).masked_fill_(invalid_TB, 0.0)
    return _accumulate_(delta_TB.masked_fill_(invalid_TB, 0.0), decay_TB)


@torch.no_grad()
def vtrace(
    log_rho_TB: Tensor,
    reward_TB: Tensor,
    discount_TB: Tensor,
    value_XB: Tensor,
    valid_TB: Tensor,
    *,
    rho_clip: float,
    c_clip: float,
    trace_lambda: float,
) -> VTrace:
    """Returns V-trace targets and advantages (Espeholt et al., 2018, eq. 1 and section 4.2).

    `log_rho_TB` is log pi(a|x) - log mu(a|x), of the learner's policy and the policy that acted. The eight parameters
    are those of the equation.
    """
    rho_TB = log_rho_TB.exp().masked_fill_(~valid_TB, 0.0)  # rho = 0 makes delta, decay and advantage 0, too
    clipped_rho_TB = rho_TB.clamp(max=rho_clip)
    delta_TB = torch.addcmul(reward_TB, discount_TB, value_XB[1:]).sub_(value_XB[:-1]).mul_(clipped_rho_TB)
    decay_TB = rho_TB.clamp_(max=c_clip).mul_(discount_TB)
    if trace_lambda != 1.0:
        decay_TB *= trace_lambda
    advantage_TB = delta_TB.clone()
    correction_TB = _accumulate_(delta_TB, decay_TB)  # v_t - V_t
    # rho (r + discount v_{t+1} - V_t) = delta + rho discount (v_{t+1} - V_{t+1}); the correction of row T is 0.
    clipped_rho_TB *= discount_TB
    advantage_TB[:-1].addcmul_(clipped_rho_TB[:-1], correction_TB[1:])
    return VTrace(correction_TB + value_XB[:-1], advantage_TB)


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Returns the mean of the valid entries of `x`; 0 if there is none."""
    return torch.where(valid, x, 0.0).sum() / valid.sum().clamp(min=1)


def masked_normalize(x: Tensor, valid: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Normalizes the valid entries of `x` to mean 0 and standard deviation 1; the others become 0."""
    centred = torch.where(valid, x - masked_mean(x, valid), 0.0)
    variance = masked_mean(centred.square(), valid)
    return centred / (variance.sqrt() + epsilon)


def policy_gradient_loss(log_prob: Tensor, advantage: Tensor, valid: Tensor) -> Tensor:
    """Returns the score-function policy-gradient loss; no gradient flows into `advantage`."""
    return -masked_mean(log_prob * advantage.detach(), valid)


def clipped_surrogate(
    log_prob: Tensor, behaviour_log_prob: Tensor, advantage: Tensor, valid: Tensor, clip: float
) -> Tensor:
    """Returns PPO's clipped surrogate loss (Schulman et al., 2017, eq. 7); no gradient flows into `advantage`."""
    advantage = advantage.detach()
    # Mask before exp: at an invalid entry the gradient of an infinite ratio would be 0 * inf.
    ratio = torch.where(valid, log_prob - behaviour_log_prob.detach(), 0.0).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage)
    return -masked_mean(surrogate, valid)


def decoupled_range(log_rho: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Returns the lowest and highest ratio of the current to the proximal policy in `decoupled_surrogate`, per step.

    It is the part of PPO's range in which the ratio to the policy that acted is within twice that range, or the edge of
    PPO's range that is closest to it. `log_rho` is the log-probability of the proximal policy minus that of the policy
    that acted.
    """
    inverse = log_rho.detach().clamp(min=-20.0).neg_().exp_()  # finite
    low, high = (1.0 - 2.0 * clip) * inverse, (1.0 + 2.0 * clip) * inverse
    return low.clamp_(1.0 - clip, 1.0 + clip), high.clamp_(1.0 - clip, 1.0 + clip)


def decoupled_surrogate(
    log_prob: Tensor, proximal_log_prob: Tensor, log_rho: Tensor, advantage: Tensor, valid: Tensor, clip: float
) -> Tensor:
    """Returns the clipped surrogate loss relative to a proximal policy, which is not the one that acted.

    Steps are weighted by the ratio of both policies (Hilton et al., 2022), truncated at 1. The ratio of the current to
    the proximal policy is clipped to `decoupled_range`. No gradient flows into `advantage`.
    """
    advantage = advantage.detach() * log_rho.detach().exp().clamp_(max=1.0)
    ratio = torch.where(valid, log_prob - proximal_log_prob.detach(), 0.0).exp()
    low, high = decoupled_range(log_rho, clip)
    return -masked_mean(torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage), valid)


def value_loss(value: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """Returns half the squared error; no gradient flows into `target`."""
    return 0.5 * masked_mean((value - target.detach()).square(), valid)


def clipped_value_loss(value: Tensor, old_value: Tensor, target: Tensor, valid: Tensor, clip: float) -> Tensor:
    """Returns half the larger squared error of `value` and of `value` clipped to within `clip` of `old_value`."""
    target, old_value = target.detach(), old_value.detach()
    near = old_value + (value - old_value).clamp(-clip, clip)
    worse = torch.maximum((value - target).square(), (near - target).square())
    return 0.5 * masked_mean(worse, valid)


def entropy_loss(entropy: Tensor, valid: Tensor) -> Tensor:
    """Returns the negative mean entropy; minimising it encourages exploration."""
    return -masked_mean(entropy, valid)
