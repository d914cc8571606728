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
from echelon.objectives.statistics import divergence
from echelon.presets.impala import ImpalaConfig
from echelon.schema import Batch


class Impala(Passes):
    """V-trace-corrected gradient steps; one per batch unless `epochs` or `minibatches` is larger."""

    def __init__(self, config: ImpalaConfig, model: Model, seed: int, peers: Peers = ALONE) -> None:
        super().__init__(config, model, seed, peers)
        self.config = config
        has_passes = self.num_passes > 1 or self.num_minibatches > 1
        # The deviation of rewards is computed on the CPU, and a recurrent core cuts its sequences where episodes end.
        self.is_static = not (has_passes or config.normalize_reward or model.network.state_shapes)

    @property
    def variant(self) -> bool:
        return False

    def count_batch(self) -> None:
        """Counts nothing: its operations do not depend on the number of batches."""

    def minibatches(self, batch: Batch) -> Iterator[Batch]:
        if self.config.epochs == self.config.minibatches == 1:
            self.check_sizes(1, batch.valid.shape[1])
            yield batch
            return
        for lanes in self.minibatch_indices(1, batch.valid.shape[1], batch.valid.device):
            yield batch.select(lanes)

    def losses(self, batch: Batch) -> Iterator[Loss]:
        config, statistics = self.config, dict[str, Tensor]()

        def targets_of(log_prob_TB: Tensor, value_XB: Tensor) -> VTrace:
            log_rho_TB = log_prob_TB - batch.log_prob
            statistics["kl"] = divergence(log_rho_TB)
            statistics["importance_weight"] = log_rho_TB.exp().clamp(max=config.rho_clip)
            return vtrace(
                log_rho_TB,
                self.rewards(batch.reward),
                config.discount * (~batch.terminated),
                value_XB,
                batch.valid,
                rho_clip=config.rho_clip,
                c_clip=config.c_clip,
                trace_lambda=config.trace_lambda,
            )

        yield actor_critic_loss(config, self.model, batch, targets_of, self.peers, statistics)
