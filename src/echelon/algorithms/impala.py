"""IMPALA: V-trace actor-critic (Espeholt et al., 2018, https://arxiv.org/abs/1802.01561).

Differences from the paper: losses are means over valid steps, not sums, so that learning rates do not depend on the
batch size; traces can decay by `trace_lambda`; advantages can be normalised; a batch can be used in several passes and
minibatches, which V-trace corrects for as for any other lag.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from echelon.algorithms.actor_critic import Passes, actor_critic_loss
from echelon.algorithms.model import Model
from echelon.algorithms.peers import ALONE, Peers
from echelon.algorithms.protocol import Loss
from echelon.objectives.policy_gradient import VTrace, vtrace
from echelon.presets.impala import ImpalaConfig
from echelon.schema import Batch


class Impala(Passes):
    """V-trace-corrected gradient steps; one per batch unless `epochs` or `minibatches` is larger."""

    def __init__(self, config: ImpalaConfig, model: Model, seed: int, peers: Peers = ALONE) -> None:
        super().__init__(config, model, seed, peers)
        self.config = config

    def minibatches(self, batch: Batch) -> Iterator[Batch]:
        if self.config.epochs == self.config.minibatches == 1:
            self.check_sizes(1, batch.valid.shape[1])
            yield batch
            return
        for lanes in self.minibatch_indices(1, batch.valid.shape[1], batch.valid.device):
            yield batch.select(lanes)

    def losses(self, batch: Batch) -> Iterator[Loss]:
        config = self.config

        def targets_of(log_prob_TB: Tensor, value_XB: Tensor) -> VTrace:
            return vtrace(
                log_prob_TB - batch.log_prob,
                self.rewards(batch.reward),
                config.discount * (~batch.terminated),
                value_XB,
                batch.valid,
                rho_clip=config.rho_clip,
                c_clip=config.c_clip,
                trace_lambda=config.trace_lambda,
            )

        yield actor_critic_loss(config, self.model, batch, targets_of, self.peers)
