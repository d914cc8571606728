"""IMPALA: V-trace actor-critic (Espeholt et al., 2018, https://arxiv.org/abs/1802.01561).

Where we differ: losses are means over valid steps, not sums, so that learning rates do not depend on the batch size;
traces may decay by `trace_lambda`; advantages may be normalised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from echelon.algorithms.model import Model
from echelon.algorithms.protocol import Loss
from echelon.algorithms.rewards import RewardScale
from echelon.config import ImpalaConfig
from echelon.networks import action_mask
from echelon.objectives.losses import masked_mean, masked_normalize, policy_gradient_loss, value_loss
from echelon.objectives.returns import vtrace
from echelon.schema import Batch, map_tree


class Impala:
    """One gradient step per batch, corrected for the lag of its data."""

    def __init__(self, config: ImpalaConfig, model: Model, seed: int) -> None:
        del seed  # nothing here is drawn
        self.config, self.model = config, model
        self.rewards = RewardScale(clip=config.reward_clip, normalize=config.normalize_reward, discount=config.discount)

    def minibatches(self, batch: Batch) -> Iterator[Batch]:
        yield batch

    def losses(self, batch: Batch) -> Iterator[Loss]:
        config, distribution = self.config, self.model.distribution
        output = self.model.evaluate(batch.observation, batch.state, batch.first)
        params, mask = output.params[:-1], action_mask(map_tree(lambda x: x[:-1], batch.observation))
        log_prob_TB = distribution.log_prob(params, batch.action, mask)
        trace = vtrace(
            log_prob_TB.detach() - batch.log_prob,
            self.rewards(batch.reward),
            config.discount * (~batch.terminated),
            output.value.detach(),
            batch.valid,
            rho_clip=config.rho_clip,
            c_clip=config.c_clip,
            trace_lambda=config.trace_lambda,
        )
        advantage_TB = trace.advantage_TB
        if config.normalize_advantage:
            advantage_TB = masked_normalize(advantage_TB, batch.valid)
        policy = policy_gradient_loss(log_prob_TB, advantage_TB, batch.valid)
        value = value_loss(output.value[:-1], trace.target_TB, batch.valid)
        entropy = masked_mean(distribution.entropy(params, mask), batch.valid)
        total = policy + config.value_weight * value - config.entropy_weight * entropy
        yield Loss(total, {"policy_loss": policy, "value_loss": value, "entropy": entropy})

    def finish(self, batch: Batch) -> None:
        self.rewards.observe(batch)
        self.model.network.update_normalizer(map_tree(lambda x: x[:-1], batch.observation), batch.valid)

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": self.rewards.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rewards.load_state_dict(state["rewards"])
