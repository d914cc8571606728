"""IMPALA: V-trace actor-critic (Espeholt et al., 2018, https://arxiv.org/abs/1802.01561).

Where we differ: losses are means over valid steps, not sums, so that learning rates do not depend on the batch size;
traces may decay by `trace_lambda`; advantages may be normalised; a batch may be learned from in several passes and
minibatches, which V-trace corrects for as it does for any other lag.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from echelon.algorithms.model import Model
from echelon.algorithms.protocol import Loss
from echelon.algorithms.rewards import RewardScale
from echelon.config import ImpalaConfig
from echelon.errors import ConfigError
from echelon.networks import action_mask
from echelon.objectives.losses import masked_mean, masked_normalize, policy_gradient_loss, value_loss
from echelon.objectives.returns import vtrace
from echelon.schema import Batch, map_tree


class Impala:
    """Gradient steps corrected for the lag of their data; one per batch unless more are asked for."""

    def __init__(self, config: ImpalaConfig, model: Model, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.config, self.model = config, model
        self.rewards = RewardScale(clip=config.reward_clip, normalize=config.normalize_reward, discount=config.discount)

    def minibatches(self, batch: Batch) -> Iterator[Batch]:
        if self.config.epochs == self.config.minibatches == 1:
            yield batch
            return
        lanes = batch.valid.shape[1]
        if lanes < self.config.minibatches:
            raise ConfigError(
                f"algorithm.minibatches={self.config.minibatches} exceeds the {lanes} sequences of a batch. Lower it, "
                "or raise --envs-per-actor."
            )
        for _ in range(self.config.epochs):
            order = torch.randperm(lanes, generator=self.generator).to(batch.valid.device)
            for index in order.tensor_split(self.config.minibatches):
                yield batch.select(index)

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
        return {"rewards": self.rewards.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rewards.load_state_dict(state["rewards"])
        self.generator.set_state(state["generator"])
