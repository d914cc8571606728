"""A3C: advantage actor-critic with gradients for data (Mnih et al., 2016, https://arxiv.org/abs/1602.01783).

An actor finds the gradient of its own rollout, at the weights that it acted with (`A3c`); whoever holds the weights
makes optimizer steps of such gradients (`GradientServer`). A rollout never lags behind the weights that it is judged
with, so advantages are GAE's, which with `gae_lambda=1` are the paper's n-step returns. V-trace would say the same, as
all its ratios are 1, at the cost of computing them. What lags is the gradient, when it is applied; nothing corrects it.

Where we differ: losses are means over valid steps, not sums; an actor steps many environments; gradients are clipped
and stepped by one optimizer for all actors, and by default averaged over `learner.batch` of them. Running statistics
of observations and rewards are those of all actors: each brings the moments of its rollouts with its gradients, and
gets the merged ones back with the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from echelon.algorithms.actor_critic import RewardScale, actor_critic_loss
from echelon.algorithms.model import Model
from echelon.algorithms.peers import ALONE, Peers
from echelon.algorithms.protocol import Loss, ParameterGroup
from echelon.custom_network import CustomNetwork
from echelon.errors import ConfigError
from echelon.layers import Normalizer
from echelon.objectives.policy_gradient import VTrace, gae
from echelon.presets.a3c import A3cConfig
from echelon.schema import Batch, GradientBatch, map_tree

SHOWN = ("loss", "policy_loss", "value_loss", "entropy")  # what goes with a gradient, in this order
REWARD_MOMENTS = 3  # count, mean, and sum of squared distances from it


@dataclass(frozen=True, slots=True)
class Gradient:
    """What one piece of a rollout says; the tensors are good until the next piece is computed."""

    flat: Tensor  # (P,)
    values: Tensor  # of SHOWN
    statistics: Tensor  # moments of rewards, then of the observations that each normaliser saw


def normalizers(model: Model) -> list[Normalizer]:
    return [module for module in model.network.modules() if isinstance(module, Normalizer)]


def num_statistics(model: Model) -> int:
    return REWARD_MOMENTS + sum(1 + 2 * module.mean.numel() for module in normalizers(model))


class PublishedScale(RewardScale):
    """Scales rewards by the deviation that came with the weights; what it observes is for whoever publishes that."""

    def __init__(self, config: A3cConfig, model: Model) -> None:
        super().__init__(clip=config.reward_clip, normalize=config.normalize_reward, discount=config.discount)
        self.model = model

    @property
    def deviation(self) -> float:
        return float(self.model.reward_deviation) if self.model.reward_deviation is not None else 1.0


class A3c:
    """The actor's side: gradients of its own rollouts."""

    def __init__(self, config: A3cConfig, model: Model) -> None:
        self.config, self.model = config, model
        self.rewards = PublishedScale(config, model)
        self._observed: list[Tensor] = []
        for module in normalizers(model):
            module.report = self._note

    def columns(self, num_envs: int) -> list[slice]:
        """The environments that each gradient is made of."""
        count = self.config.minibatches
        if num_envs < count:
            raise ConfigError(
                f"algorithm.minibatches={count} exceeds the {num_envs} environments of an actor. Lower it, or raise "
                "--envs-per-actor."
            )
        bounds = [num_envs * i // count for i in range(count + 1)]
        return [slice(start, stop) for start, stop in pairwise(bounds)]

    def gradients(self, rollout: Batch) -> Iterator[Gradient]:
        """One gradient for each slice of `columns`, all at the weights as they are now."""
        num_envs = rollout.valid.shape[1]
        for part in self.columns(num_envs):
            whole = part.stop - part.start == num_envs
            batch = rollout if whole else rollout.select(torch.arange(part.start, part.stop))
            loss = self.loss(batch)
            self.model.descend(loss.value)
            values = torch.stack([loss.value.detach(), *(loss.metrics[name].detach() for name in SHOWN[1:])])
            yield Gradient(self.model.gradients, values, self._statistics(batch))

    def loss(self, batch: Batch) -> Loss:
        config = self.config

        def judge(log_prob_TB: Tensor, value_XB: Tensor) -> VTrace:
            del log_prob_TB  # it is that of the policy that acted
            reward_TB, discount_TB = self.rewards(batch.reward), config.discount * (~batch.terminated)
            advantage_TB = gae(reward_TB, discount_TB, value_XB, batch.valid, config.gae_lambda)
            return VTrace(advantage_TB + value_XB[:-1], advantage_TB)

        return actor_critic_loss(config, self.model, batch, judge)

    def _statistics(self, batch: Batch) -> Tensor:
        self._observed.clear()
        self.model.network.update_normalizer(map_tree(lambda x: x[:-1], batch.observation), batch.valid)
        rewards = torch.tensor(self.rewards.moments(batch), dtype=torch.float64)
        return torch.cat([rewards, *self._observed])

    def _note(self, num_valid: Tensor, mean: Tensor, variance: Tensor) -> None:
        self._observed += [num_valid.double().reshape(1), mean, variance]


class GradientServer:
    """The side of whoever holds the weights: one optimizer step of each batch of gradients."""

    def __init__(self, config: A3cConfig, model: Model, seed: int = 0, peers: Peers = ALONE) -> None:
        del seed, peers  # nothing is drawn, and gradients come to one learner
        network = model.network
        if isinstance(network, CustomNetwork) and network.has_statistics:
            raise ConfigError(
                f'network.name="{model.config.name}" keeps statistics of its own (update_normalizer), which a3c cannot '
                "add up over actors. Use --network.normalize-observation with the networks here, or impala or ppo."
            )
        self.config, self.model = config, model
        self.groups: dict[str, ParameterGroup] = {}
        self.rewards = RewardScale(clip=0.0, normalize=config.normalize_reward, discount=config.discount)
        self.normalizers = normalizers(model)

    def minibatches(self, batch: GradientBatch) -> list[GradientBatch]:
        return [batch]

    def losses(self, batch: GradientBatch) -> Iterator[Loss]:
        count = batch.num_gradients if self.config.reduce == "mean" else 1
        shown = dict(zip(SHOWN, batch.values, strict=True))
        yield Loss(shown.pop("loss"), shown, gradient=batch.gradient / count)

    def priorities(self, minibatch: Any) -> None:
        """A gradient is applied once."""

    def finish(self, batch: GradientBatch) -> None:
        """Merges what the rollouts said of observations and rewards; it is published with the weights."""
        for statistics in batch.statistics:
            count, mean, squares = statistics[:REWARD_MOMENTS].tolist()
            self.rewards.merge(count, mean, squares)
            rest = statistics[REWARD_MOMENTS:].to(self.model.device)
            for module in self.normalizers:
                size = module.mean.numel()
                module.merge(rest[0], rest[1 : 1 + size], rest[1 + size : 1 + 2 * size])
                rest = rest[1 + 2 * size :]
        self._show_deviation()

    def _show_deviation(self) -> None:
        if self.model.reward_deviation is not None:
            self.model.reward_deviation.fill_(self.rewards.deviation)

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": self.rewards.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rewards.load_state_dict(state["rewards"])
        self._show_deviation()
