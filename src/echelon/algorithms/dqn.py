"""DQN: double Q-learning (van Hasselt et al., 2016, https://arxiv.org/abs/1509.06461), on n-step transitions.

Differences from the papers: the dueling streams (Wang et al., 2016, https://arxiv.org/abs/1511.06581) split at the last
hidden layer, and gradients into the shared part are not rescaled; the target network can be updated softly; targets
never bootstrap from an action that the next mask forbids.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from echelon.algorithms.model import Model
from echelon.algorithms.peers import ALONE, Peers
from echelon.algorithms.protocol import Loss
from echelon.algorithms.replayed import Replayed
from echelon.algorithms.target import TargetNetwork
from echelon.networks import action_mask
from echelon.objectives.distributions import forbid
from echelon.objectives.values import double_q_errors, huber_loss
from echelon.presets.dqn import DqnConfig
from echelon.schema import TransitionBatch


class Dqn(Replayed):
    """One update per batch, on its TD errors; the model is the Q-network."""

    def __init__(self, config: DqnConfig, model: Model, seed: int, peers: Peers = ALONE) -> None:
        super().__init__(model, seed, peers, normalize_reward=config.normalize_reward)
        self.config = config
        self.target = TargetNetwork(model, tau=config.target_tau or 1.0)
        self.targets["model"] = self.target

    @property
    def variant(self) -> bool:
        """Whether the target network is updated after the next batch."""
        period = self.config.target_period
        return period == 0 or self.num_learned % period == period - 1

    def losses(self, minibatch: TransitionBatch) -> Iterator[Loss]:
        yield self._loss(minibatch)
        if self.variant:
            self.target.follow()

    def _loss(self, batch: TransitionBatch) -> Loss:
        with self.model.autocast():
            with torch.no_grad():
                next_target_BA = self.target.params(batch.next_observation)
                next_online_BA = self.model.params(batch.next_observation) if self.config.double else next_target_BA
            q_BA = self.model.params(batch.observation)
        errors = double_q_errors(
            q_BA,
            batch.action,
            batch.reward,
            batch.discount,
            forbid(next_online_BA, action_mask(batch.next_observation)),
            next_target_BA,
        )
        self.errors = errors.detach()
        loss = huber_loss(errors, batch.weight, self.config.huber)
        q_B = q_BA.gather(-1, batch.action.unsqueeze(-1))
        return Loss(loss, self._statistics(batch, q_B, q_BA), count=len(batch.reward))

    @torch.no_grad()
    def _statistics(self, batch: TransitionBatch, q_B: torch.Tensor, q_BA: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the mean value of the actions taken and of the best allowed ones, and the mean size of TD errors."""
        best_B = forbid(q_BA, action_mask(batch.observation)).amax(-1)
        return {"q_mean": q_B.mean(), "q_max": best_B.mean(), "td_error": self.errors.abs().mean()}
