"""IMPALA: V-trace actor-critic (Espeholt et al., 2018, https://arxiv.org/abs/1802.01561).

Where we differ: losses are means over valid steps, not sums, so that learning rates do not depend on the batch size;
traces may decay by `trace_lambda`; advantages may be normalised; a batch may be learned from in several passes and
minibatches, which V-trace corrects for as it does for any other lag.
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.algorithms.model import Model
from echelon.algorithms.passes import Passes
from echelon.algorithms.protocol import Loss
from echelon.config import ImpalaConfig
from echelon.networks import action_mask
from echelon.objectives.losses import masked_mean, masked_normalize, policy_gradient_loss, value_loss
from echelon.objectives.returns import vtrace
from echelon.schema import Batch, map_tree


class Impala(Passes):
    """Gradient steps corrected for the lag of their data; one per batch unless more are asked for."""

    def __init__(self, config: ImpalaConfig, model: Model, seed: int) -> None:
        super().__init__(config, model, seed)
        self.config = config

    def minibatches(self, batch: Batch) -> Iterator[Batch]:
        if self.config.epochs == self.config.minibatches == 1:
            yield batch
            return
        for lanes in self.pieces(batch.valid.shape[1], batch.valid.device):
            yield batch.select(lanes)

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
