"""The base class of algorithms that learn from replayed transitions: critics, target networks, priorities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from echelon.algorithms.model import FlatModule, Model
from echelon.algorithms.peers import ALONE, Peers, embed, extract
from echelon.algorithms.protocol import Loss, ParameterGroup
from echelon.algorithms.target import TargetNetwork
from echelon.algorithms.value_networks import Critic
from echelon.config import REWARD_BOUND
from echelon.objectives.distributions import Sample
from echelon.objectives.values import priorities
from echelon.schema import TransitionBatch


class RewardMagnitude:
    """The running root mean square of the rewards that were learned from.

    Replayed transitions have no order, so discounted returns, whose deviation scales the rewards of trajectories, are
    not known. All of it is stored on the device and computed there: a CUDA graph can include it.
    """

    def __init__(self, device: torch.device, peers: Peers) -> None:
        self.peers = peers
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # number of rewards, sum of their squares

    def normalized(self, reward_B: Tensor) -> Tensor:
        """Returns rewards divided by the root mean square of those before; unchanged while all of them were 0.

        They are bounded as those of `RewardScale`: a first reward after thousands of zeros would count a hundredfold.
        """
        count, squares = self.sums.unbind()
        scale = torch.where(squares > 0, (squares / count.clamp(min=1.0)).sqrt(), 1.0)
        return (reward_B / scale).clamp(-REWARD_BOUND, REWARD_BOUND).to(reward_B.dtype)

    def observe(self, reward_B: Tensor) -> None:
        """Adds the rewards of a batch, those of all learners."""
        squares = reward_B.double().square().sum()
        added = torch.stack((torch.full_like(squares, len(reward_B)), squares))
        self.peers.add_up(added)
        self.sums += added

    def load(self, sums: Tensor) -> None:
        if sums.shape != self.sums.shape or not bool((sums >= 0).all() and sums.isfinite().all()):
            raise ValueError(f"the count and the squares of rewards are {sums.tolist()}")
        self.sums.copy_(sums)


class Replayed(ABC):
    """Base class: one batch of transitions is one minibatch; a transition's TD error is its new priority."""

    is_static = True

    def __init__(self, model: Model, seed: int, peers: Peers = ALONE, *, normalize_reward: bool = False) -> None:
        self.model, self.peers = model, peers
        self.rewards = RewardMagnitude(model.device, peers) if normalize_reward else None
        self.groups: dict[str, ParameterGroup] = {}
        self.targets: dict[str, TargetNetwork] = {}
        self.seed, self.generator = seed, torch.Generator(model.device).manual_seed(seed)
        self.num_learned = 0  # batches
        self.errors = torch.zeros(0)  # of the last minibatch: (B,), or (N, B) of N critics

    def build_critic(self, num: int, seed: int) -> FlatModule:
        """Returns the critics: those of the model if it publishes them, else new ones that only the learner has."""
        critic = self.model.critic
        if critic is None:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # only the CPU generator; the caller owns those of GPUs
                critic = FlatModule(Critic(self.model.config, self.model.spaces, num), self.model.device)
        return critic

    def sample(self, params: Tensor, others: tuple[int, int]) -> Sample:
        """Samples actions for the rows of this learner, equal to those that a single learner would sample."""
        drawn = self.model.distribution.sample(embed(params, others), self.generator)
        return Sample(extract(drawn.action, others), extract(drawn.log_prob, others))

    @torch.no_grad()
    def critic_statistics(self, q_NB: Tensor) -> dict[str, Tensor]:
        """Returns the means over the critics, of the highest critics, and of the sizes of TD errors."""
        return {"q_mean": q_NB.mean(), "q_max": q_NB.amax(0).mean(), "td_error": self.errors.abs().mean()}

    @property
    def variant(self) -> bool:
        return False

    def minibatches(self, batch: TransitionBatch) -> Iterator[TransitionBatch]:
        yield batch if self.rewards is None else replace(batch, reward=self.rewards.normalized(batch.reward))

    @abstractmethod
    def losses(self, minibatch: TransitionBatch) -> Iterator[Loss]:
        """See `Algorithm.losses`."""

    def priorities(self, minibatch: TransitionBatch) -> Tensor:
        return priorities(self.errors)

    def count_batch(self) -> None:
        self.num_learned += 1

    def finish(self, batch: TransitionBatch) -> None:
        self.count_batch()
        if self.rewards is not None:
            self.rewards.observe(batch.reward)
        if self.model.config.normalize_observation:
            seen = torch.ones(len(batch.reward), dtype=torch.bool, device=batch.reward.device)
            self.model.network.update_normalizer(batch.observation, seen)
            for group in self.groups.values():
                if isinstance(group.module.network, Critic):
                    group.module.network.update_normalizer(batch.observation, seen)

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_learned": self.num_learned,
            "generator": self.generator.get_state(),
            "groups": {name: group.module.weights() for name, group in self.groups.items()},
            "targets": {name: target.state_dict() for name, target in self.targets.items()},
            **({} if self.rewards is None else {"rewards": self.rewards.sums.cpu()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_learned = int(state["num_learned"])
        if state["generator"].shape == self.generator.get_state().shape:
            self.generator.set_state(state["generator"])
        else:  # a checkpoint of another kind of device, whose generator differs: start a new stream
            self.generator.manual_seed(self.seed + self.num_learned)
        for name, group in self.groups.items():
            group.module.load_weights(state["groups"][name], f"the checkpoint's {name}")
        for name, target in self.targets.items():
            target.load_state_dict(state["targets"][name])
        if self.rewards is not None:
            self.rewards.load(state["rewards"])
