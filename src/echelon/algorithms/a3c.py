"""A3C: advantage actor-critic with gradients as data (Mnih et al., 2016, https://arxiv.org/abs/1602.01783).

An actor computes the gradient of its own rollout at the weights that it acted with (`A3c`); the learner, which holds
the weights, applies these gradients (`GradientServer`). A rollout does not lag behind the weights that its gradient is
computed at, so advantages are GAE's, which with `gae_lambda=1` are the paper's n-step returns. V-trace would give the
same result, because all its ratios are 1, at additional cost. The gradient lags when it is applied; this is not
corrected.

Differences from the paper: losses are means over valid steps, not sums; an actor steps many environments; one optimizer
clips and applies the gradients of all actors, by default averaged over `learner.batch` of them. Running statistics of
observations and rewards cover all actors: each actor sends the moments of its rollouts with its gradients and receives
the merged statistics with the weights.
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
from echelon.names import text_of
from echelon.objectives.policy_gradient import VTrace, gae
from echelon.objectives.statistics import MOMENTS
from echelon.presets.a3c import A3cConfig
from echelon.schema import Batch, GradientBatch, map_tree

SHOWN = ("loss.total", "loss.policy", "loss.value", "entropy", *MOMENTS)  # sent with a gradient, in this order
REWARD_MOMENTS = 3  # count, mean, and sum of squared deviations from the mean


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of one part of a rollout; its tensors are valid until the next gradient is computed."""

    flat: Tensor  # (P,)
    values: Tensor  # of SHOWN
    statistics: Tensor  # moments of rewards, then of the observations of each normalizer


def normalizers(model: Model) -> list[Normalizer]:
    return [module for module in model.network.modules() if isinstance(module, Normalizer)]


def num_statistics(model: Model) -> int:
    return REWARD_MOMENTS + sum(1 + 2 * module.mean.numel() for module in normalizers(model))


class PublishedScale(RewardScale):
    """Scales rewards by the standard deviation published with the weights; its own moments go to the learner."""

    def __init__(self, config: A3cConfig, model: Model) -> None:
        super().__init__(clip=config.reward_clip, normalize=config.normalize_reward, discount=config.discount)
        self.model = model

    @property
    def deviation(self) -> float:
        return float(self.model.reward_deviation) if self.model.reward_deviation is not None else 1.0


class A3c:
    """The actor's part: computes gradients of its own rollouts."""

    def __init__(self, config: A3cConfig, model: Model) -> None:
        self.config, self.model = config, model
        self.rewards = PublishedScale(config, model)
        self._observed: list[Tensor] = []
        for module in normalizers(model):
            module.report = self._note

    def columns(self, num_envs: int) -> list[slice]:
        """Returns the environments of each gradient, as slices."""
        count = self.config.minibatches
        if num_envs < count:
            raise ConfigError(
                f"algorithm.minibatches={count} exceeds the {num_envs} environments of an actor. Lower it, or raise "
                "--envs-per-actor."
            )
        bounds = [num_envs * i // count for i in range(count + 1)]
        return [slice(start, stop) for start, stop in pairwise(bounds)]

    def gradients(self, rollout: Batch) -> Iterator[Gradient]:
        """Yields one gradient per slice of `columns`, all at the current weights."""
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

        def targets_of(log_prob_TB: Tensor, value_XB: Tensor) -> VTrace:
            del log_prob_TB  # equals the log-probability of the policy that acted
            reward_TB, discount_TB = self.rewards(batch.reward), config.discount * (~batch.terminated)
            advantage_TB = gae(reward_TB, discount_TB, value_XB, batch.valid, config.gae_lambda)
            return VTrace(advantage_TB + value_XB[:-1], advantage_TB)

        return actor_critic_loss(config, self.model, batch, targets_of)

    def _statistics(self, batch: Batch) -> Tensor:
        self._observed.clear()
        self.model.network.update_normalizer(map_tree(lambda x: x[:-1], batch.observation), batch.valid)
        rewards = torch.tensor(self.rewards.moments(batch), dtype=torch.float64)
        return torch.cat([rewards, *self._observed])

    def _note(self, num_valid: Tensor, mean: Tensor, variance: Tensor) -> None:
        self._observed += [num_valid.double().reshape(1), mean, variance]


class GradientServer:
    """The learner's part: one optimizer step per batch of gradients."""

    is_static = False  # gradients come with statistics that are merged on the CPU

    def __init__(self, config: A3cConfig, model: Model, seed: int = 0, peers: Peers = ALONE) -> None:
        del seed, peers  # it draws no random numbers, and one learner receives all gradients
        network = model.network
        if isinstance(network, CustomNetwork) and network.has_statistics:
            raise ConfigError(
                f'network.name="{text_of(model.config.name)}" keeps its own statistics (update_normalizer), which '
                "a3c cannot merge over actors. Use a built-in network with --network.normalize-observation, or impala "
                "or ppo."
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
        yield Loss(shown.pop("loss.total"), shown, gradient=batch.gradient / count)

    def priorities(self, minibatch: Any) -> None:
        """None: a gradient is applied once."""

    def finish(self, batch: GradientBatch) -> None:
        """Merges the moments of observations and rewards, which are published with the weights."""
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
