"""SAC: soft actor-critic with a learned temperature (Haarnoja et al., 2018, https://arxiv.org/abs/1812.05905).

For discrete actions (Christodoulou, 2019, https://arxiv.org/abs/1910.07207) the critics value every action, and
expectations over actions replace samples. Differences from the paper: a tanh, not clipping, bounds the log standard
deviations; an n-step target includes only the entropy of its bootstrap value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from echelon.algorithms.model import FlatModule, Model
from echelon.algorithms.peers import ALONE, Peers
from echelon.algorithms.protocol import Loss, ParameterGroup
from echelon.algorithms.replayed import Replayed
from echelon.algorithms.target import TargetNetwork
from echelon.networks import action_mask
from echelon.objectives.distributions import Categorical, num_allowed
from echelon.objectives.values import expected_soft_value, huber_loss, soft_targets, temperature_loss
from echelon.presets.sac import SacConfig
from echelon.schema import TransitionBatch, Tree


class Temperature(nn.Module):
    """The temperature, stored as a logarithm."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.log_value = nn.Parameter(torch.tensor(math.log(value)))


class Sac(Replayed):
    """Updates critics, policy and temperature at every step, in this order; the model is the policy."""

    def __init__(self, config: SacConfig, model: Model, seed: int, peers: Peers = ALONE) -> None:
        super().__init__(model, seed, peers, normalize_reward=config.normalize_reward)
        self.config = config
        self.critic = self.build_critic(config.num_critics, seed + 1)
        self.groups["critic"] = ParameterGroup(self.critic, config.critic_learning_rate)
        self.target = TargetNetwork(self.critic, tau=config.target_tau)
        self.targets["critic"] = self.target
        self.temperature = FlatModule(Temperature(config.temperature), model.device)
        if config.learn_temperature:
            self.groups["temperature"] = ParameterGroup(self.temperature, config.temperature_learning_rate)
        self.discrete = isinstance(model.distribution, Categorical)

    def target_entropy(self, observation: Tree) -> float | Tensor:
        """Returns the entropy that the temperature aims for: one for all rows, or (B,) where actions are masked."""
        if self.config.target_entropy is not None:
            return self.config.target_entropy
        num_params, fraction = self.model.distribution.num_params, self.config.target_entropy_fraction
        if not self.discrete:
            return -num_params / 2.0
        mask = action_mask(observation)
        return fraction * (math.log(num_params) if mask is None else num_allowed(mask).log())

    @property
    def log_temperature(self) -> Tensor:
        return self.temperature.network.log_value  # type: ignore[return-value]

    def losses(self, minibatch: TransitionBatch) -> Iterator[Loss]:
        yield self._critic_loss(minibatch)
        policy_loss, log_prob_B = self._policy_loss(minibatch)
        yield policy_loss
        if self.config.learn_temperature:
            target_entropy = self.target_entropy(minibatch.observation)
            loss = temperature_loss(self.log_temperature, log_prob_B, target_entropy)
            yield Loss(loss, group="temperature", count=len(log_prob_B))
        self.target.follow()

    def _critic_loss(self, batch: TransitionBatch) -> Loss:
        with self.model.autocast():
            with torch.no_grad():
                target_B = self._targets(batch)
            q_NB = self.critic.network(batch.observation, None if self.discrete else batch.action)
            if self.discrete:
                action = batch.action.expand(len(q_NB), -1).unsqueeze(-1)
                q_NB = q_NB.gather(-1, action).squeeze(-1)
        errors = target_B - q_NB
        self.errors = errors.detach()
        loss = huber_loss(errors, batch.weight, 0.0)
        return Loss(loss, self.critic_statistics(q_NB), "critic", count=len(q_NB[0]))

    def _targets(self, batch: TransitionBatch) -> Tensor:
        observation, temperature = batch.next_observation, self.log_temperature.exp()
        if self.discrete:
            soft_value_B = expected_soft_value(self.target.network(observation), self._log_p(observation), temperature)
            return torch.addcmul(batch.reward, batch.discount, soft_value_B)
        sample = self.sample(self.model.params(observation), batch.others)
        next_q_NB = self.target.network(observation, sample.action)
        return soft_targets(batch.reward, batch.discount, next_q_NB, sample.log_prob, temperature)

    def _log_p(self, observation: Tree) -> Tensor:
        """Returns the log-probability of every discrete action (B, A)."""
        distribution = self.model.distribution
        assert isinstance(distribution, Categorical)
        return distribution.log_probabilities(self.model.params(observation), action_mask(observation))

    def _policy_loss(self, batch: TransitionBatch) -> tuple[Loss, Tensor]:
        """Returns the loss, and the log-probability of the policy's new actions (discrete: its expectation)."""
        temperature = self.log_temperature.detach().exp()
        with self.model.autocast():
            if self.discrete:
                log_p_BA = self._log_p(batch.observation)
                q_NBA = self.critic.network(batch.observation).detach()
                value_B = expected_soft_value(q_NBA, log_p_BA, temperature)
                log_prob_B = (log_p_BA.exp() * log_p_BA).sum(-1)
            else:
                sample = self.sample(self.model.params(batch.observation), batch.others)
                q_NB = self.critic.network(batch.observation, sample.action)
                value_B, log_prob_B = q_NB.amin(0) - temperature * sample.log_prob, sample.log_prob
        loss = -value_B.mean()
        shown = {"entropy": -log_prob_B.mean(), "temperature": temperature}
        return Loss(loss, shown, count=len(value_B), name="policy"), log_prob_B
