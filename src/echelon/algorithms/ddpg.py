"""DDPG (Lillicrap et al., 2016, https://arxiv.org/abs/1509.02971) and TD3 (Fujimoto et al., 2018,
https://arxiv.org/abs/1802.09477); the configuration selects one.

Difference from the papers: transitions are n-step (Horgan et al., 2018). With several critics the policy maximises the
first, as in TD3. Exploration noise is Gaussian; with `noise_correlation` it is an Ornstein-Uhlenbeck process.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from echelon.algorithms.model import Model
from echelon.algorithms.peers import ALONE, Peers, embed, extract
from echelon.algorithms.protocol import Loss, ParameterGroup
from echelon.algorithms.replayed import Replayed
from echelon.algorithms.target import TargetNetwork
from echelon.objectives.values import clipped_double_targets, huber_loss, smoothed_actions
from echelon.presets.ddpg import DdpgConfig
from echelon.schema import TransitionBatch


class Ddpg(Replayed):
    """Updates the critics at every step and the policy at every `policy_delay`-th; the model is the policy."""

    def __init__(self, config: DdpgConfig, model: Model, seed: int, peers: Peers = ALONE) -> None:
        super().__init__(model, seed, peers, normalize_reward=config.normalize_reward)
        self.config = config
        self.critic = self.build_critic(config.num_critics, seed + 1)
        self.groups["critic"] = ParameterGroup(self.critic, config.critic_learning_rate, config.critic_weight_decay)
        self.target_critic = TargetNetwork(self.critic, tau=config.target_tau)
        self.target_policy = TargetNetwork(model, tau=config.target_tau)
        self.targets |= {"critic": self.target_critic, "policy": self.target_policy}

    @property
    def variant(self) -> bool:
        """Whether the next batch also updates the policy."""
        return self.num_learned % self.config.policy_delay == self.config.policy_delay - 1

    def losses(self, minibatch: TransitionBatch) -> Iterator[Loss]:
        yield self._critic_loss(minibatch)
        if self.variant:
            yield self._policy_loss(minibatch)
            self.target_critic.follow()
            self.target_policy.follow()

    def _critic_loss(self, batch: TransitionBatch) -> Loss:
        config, distribution = self.config, self.model.distribution
        with self.model.autocast():
            with torch.no_grad():
                action = distribution.mode(self.target_policy.params(batch.next_observation))
                action = embed(action, batch.others)
                action = smoothed_actions(action, config.target_noise, config.target_noise_clip, self.generator)
                action = extract(action, batch.others)
                next_q_NB = self.target_critic.network(batch.next_observation, action)
            q_NB = self.critic.network(batch.observation, batch.action)
        errors = clipped_double_targets(batch.reward, batch.discount, next_q_NB) - q_NB
        self.errors = errors.detach()
        loss = huber_loss(errors, batch.weight, config.huber)
        return Loss(loss, self.critic_statistics(q_NB), "critic", count=len(q_NB[0]))

    def _policy_loss(self, batch: TransitionBatch) -> Loss:
        with self.model.autocast():
            action = self.model.distribution.mode(self.model.params(batch.observation))
            q_B = self.critic.network(batch.observation, action)[0]
        loss = -q_B.mean()
        return Loss(loss, count=len(q_B), name="policy")
