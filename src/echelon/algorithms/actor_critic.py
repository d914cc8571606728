"""What rules with a policy and a value of states share: their loss."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from echelon.algorithms.model import Model
from echelon.algorithms.peers import ALONE, Peers, normalize
from echelon.algorithms.protocol import Loss
from echelon.config import A3cConfig, ImpalaConfig
from echelon.networks import action_mask
from echelon.objectives.losses import masked_mean, policy_gradient_loss, value_loss
from echelon.objectives.returns import VTrace
from echelon.schema import Batch, map_tree

Judge = Callable[[Tensor, Tensor], VTrace]  # of log-probabilities (T, B) and values (T + 1, B), both without gradient


def actor_critic_loss(
    config: ImpalaConfig | A3cConfig, model: Model, batch: Batch, judge: Judge, peers: Peers = ALONE
) -> Loss:
    """Policy gradient, value error and entropy of trajectories, with the targets and advantages that `judge` finds."""
    distribution = model.distribution
    output = model.evaluate(batch.observation, batch.state, batch.first)
    params, mask = output.params[:-1], action_mask(map_tree(lambda x: x[:-1], batch.observation))
    log_prob_TB = distribution.log_prob(params, batch.action, mask)
    judged = judge(log_prob_TB.detach(), output.value.detach())
    advantage_TB = judged.advantage_TB
    if config.normalize_advantage:
        advantage_TB = normalize(advantage_TB, batch.valid, peers)
    policy = policy_gradient_loss(log_prob_TB, advantage_TB, batch.valid)
    value = value_loss(output.value[:-1], judged.target_TB, batch.valid)
    entropy = masked_mean(distribution.entropy(params, mask), batch.valid)
    total = policy + config.value_weight * value - config.entropy_weight * entropy
    count = batch.valid.sum() if peers.size > 1 else 1
    return Loss(total, {"policy_loss": policy, "value_loss": value, "entropy": entropy}, count=count)
