"""Shared parts of IMPALA, PPO and A3C: the actor-critic loss, passes over a batch, reward scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.algorithms.model import Model
from echelon.algorithms.peers import ALONE, Peers, normalize
from echelon.algorithms.protocol import Loss, ParameterGroup
from echelon.config import REWARD_BOUND
from echelon.errors import ConfigError
from echelon.networks import action_mask
from echelon.objectives.policy_gradient import VTrace, masked_mean, policy_gradient_loss, value_loss
from echelon.objectives.statistics import masked_means, value_moments
from echelon.presets.a3c import A3cConfig
from echelon.presets.impala import ImpalaConfig
from echelon.presets.ppo import PpoConfig
from echelon.schema import Batch, map_tree

Array = np.ndarray[Any, Any]
EPSILON = 1e-8
TargetFunction = Callable[[Tensor, Tensor], VTrace]  # from detached log-probabilities (T, B) and values (T + 1, B)


def actor_critic_loss(
    config: ImpalaConfig | A3cConfig,
    model: Model,
    batch: Batch,
    targets_of: TargetFunction,
    peers: Peers = ALONE,
    statistics: Mapping[str, Tensor] | None = None,
) -> Loss:
    """Returns the policy-gradient, value and entropy loss; `targets_of` computes targets and advantages.

    The means of `statistics` (T, B), which `targets_of` may fill, are metrics of the loss.
    """
    distribution = model.distribution
    output = model.evaluate(batch.observation, batch.state, batch.first)
    params, mask = output.params[:-1], action_mask(batch.observation)
    if mask is not None:
        mask = mask[:-1]
    log_prob_TB = distribution.log_prob(params, batch.action, mask)
    found = targets_of(log_prob_TB.detach(), output.value.detach())
    advantage_TB = found.advantage_TB
    if config.normalize_advantage:
        advantage_TB = normalize(advantage_TB, batch.valid, peers)
    policy = policy_gradient_loss(log_prob_TB, advantage_TB, batch.valid)
    value = value_loss(output.value[:-1], found.target_TB, batch.valid)
    entropy = masked_mean(distribution.entropy(params, mask), batch.valid)
    total = policy + config.value_weight * value - config.entropy_weight * entropy
    shown = {"loss.policy": policy, "loss.value": value, "entropy": entropy}
    columns = {**value_moments(output.value.detach()[:-1], found.target_TB), **(statistics or {})}
    return Loss(total, shown | masked_means(columns, batch.valid), count=batch.valid.sum())


class Passes:
    """Passes (epochs) over the lanes of a batch, each in a new random order."""

    is_static = False  # the order is drawn on the CPU

    def __init__(self, config: ImpalaConfig | PpoConfig, model: Model, seed: int, peers: Peers = ALONE) -> None:
        self.model, self.peers = model, peers
        self.groups: dict[str, ParameterGroup] = {}
        self.num_passes, self.num_minibatches = config.epochs, config.minibatches
        self.generator = torch.Generator().manual_seed(seed)
        self.has_statistics = model.network.has_statistics
        self.rewards = RewardScale(clip=config.reward_clip, normalize=config.normalize_reward, discount=config.discount)

    def minibatch_indices(self, rows: int, lanes: int, device: torch.device) -> Iterator[torch.Tensor]:
        """Yields the indices of each minibatch, pass by pass, among the `rows` x `lanes` sequences in row-major order.

        The permutation covers the sequences of all learners, whose lanes are concatenated; each learner takes the part
        of a minibatch that falls on its own lanes.
        """
        self.check_sizes(rows, lanes)
        rank, width = self.peers.rank, lanes * self.peers.size
        for _ in range(self.num_passes):
            order = torch.randperm(rows * width, generator=self.generator)
            if self.peers.size == 1:
                yield from order.to(device).tensor_split(self.num_minibatches)
                continue
            for piece in order.tensor_split(self.num_minibatches):
                row, lane = piece // width, piece % width - rank * lanes
                yield (row * lanes + lane)[(lane >= 0) & (lane < lanes)].to(device)

    def check_sizes(self, rows: int, lanes: int) -> None:
        """Raises ConfigError unless `rows` x `lanes` sequences suffice for all minibatches and microbatches."""
        num_sequences, remedy = rows * lanes * self.peers.size, "Lower it, or raise --envs-per-actor."
        if num_sequences < self.num_minibatches:
            raise ConfigError(
                f"algorithm.minibatches={self.num_minibatches} exceeds the {num_sequences} sequences of a batch. "
                f"{remedy}"
            )
        most = min(lanes, rows * lanes // self.num_minibatches)
        if self.model.microbatches > max(most, 1):
            raise ConfigError(
                f"learner.microbatches={self.model.microbatches} exceeds the {most} sequences that a learner has of a "
                f"minibatch. {remedy}"
            )

    def priorities(self, minibatch: Any) -> None:
        """Returns None: trajectories are not replayed, so they have no priorities."""

    def finish(self, batch: Batch) -> None:
        if self.peers.size == 1:
            self.rewards.observe(batch)
        elif self.rewards.normalize:
            mine = torch.tensor(self.rewards.moments(batch), dtype=torch.float64)
            for count, mean, squares in self.peers.gather(mine).tolist():
                self.rewards.merge(count, mean, squares)
        if self.has_statistics:
            self.model.network.update_normalizer(map_tree(lambda x: x[:-1], batch.observation), batch.valid)

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": self.rewards.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rewards.load_state_dict(state["rewards"])
        self.generator.set_state(state["generator"])


class RewardScale:
    """Clips rewards, or divides them by the running standard deviation of the environments' discounted returns.

    Discounted returns continue across batches, so one is kept per lane of the run. Rewards of a batch are scaled before
    the batch's own returns are merged.
    """

    def __init__(self, *, clip: float, normalize: bool, discount: float) -> None:
        self.clip, self.normalize, self.discount = clip, normalize, discount
        self.returns = torch.zeros(0, dtype=torch.float64)
        self.count, self.mean, self.squares = 0.0, 0.0, 0.0

    def __call__(self, reward_TB: torch.Tensor) -> torch.Tensor:
        if self.normalize:
            reward_TB = (reward_TB / self.deviation).clamp(-REWARD_BOUND, REWARD_BOUND)
        if self.clip > 0:
            reward_TB = reward_TB.clamp(-self.clip, self.clip)
        return reward_TB

    @property
    def deviation(self) -> float:
        return (self.squares / self.count + EPSILON) ** 0.5 if self.count > 1 else 1.0

    def observe(self, batch: Batch) -> None:
        """Merges the returns of `batch` into the running standard deviation."""
        if not self.normalize:
            return
        for columns in _in_order(batch.lanes.cpu().numpy()):
            self._observe(batch, columns)

    def moments(self, batch: Batch) -> list[float]:
        """Returns the moments of the returns of `batch` alone, without merging them."""
        past, (self.count, self.mean, self.squares) = (self.count, self.mean, self.squares), (0.0, 0.0, 0.0)
        self.observe(batch)
        found, (self.count, self.mean, self.squares) = [self.count, self.mean, self.squares], past
        return found

    def _observe(self, batch: Batch, columns: Array | slice) -> None:
        """Merges columns of distinct lanes."""
        lanes = batch.lanes.cpu().numpy()[columns]
        if int(lanes.max()) >= self.returns.numel():
            grown = torch.zeros(int(lanes.max()) + 1, dtype=torch.float64)
            grown[: self.returns.numel()] = self.returns
            self.returns = grown
        # Small arrays, one row at a time: here numpy costs a third of torch.
        reward_TB = batch.reward.cpu().numpy()[:, columns].astype(np.float64)
        valid_TB = batch.valid.cpu().numpy()[:, columns]
        goes_on_TB = ~batch.first.cpu().numpy()[:-1, columns]  # also False where an environment or its actor restarted
        decay_TB = goes_on_TB * self.discount
        returns = self.returns.numpy()
        running_B = returns[lanes]
        for decay_B, row_B in zip(decay_TB, reward_TB, strict=True):
            row_B += decay_B * running_B  # the rewards become the returns
            running_B = row_B
        returns[lanes] = running_B
        self._take(reward_TB[valid_TB])

    def _take(self, values: Array) -> None:
        if values.size:
            mean = float(values.mean())
            self.merge(float(values.size), mean, float(((values - mean) ** 2).sum()))

    def merge(self, count: float, mean: float, squares: float) -> None:
        """Merges the moments of other returns (Chan et al., 1979)."""
        if count == 0:
            return
        total, delta = self.count + count, mean - self.mean
        self.squares += squares + delta * delta * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    def state_dict(self) -> dict[str, Any]:
        return {"returns": self.returns, "count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        returns, moments = state["returns"], [float(state[name]) for name in ("count", "mean", "squares")]
        if returns.dtype != torch.float64 or returns.ndim != 1 or not np.isfinite(moments).all() or moments[2] < 0:
            raise ValueError(f"returns of {returns.dtype} with count, mean and squares {moments}")
        self.returns, (self.count, self.mean, self.squares) = returns, moments


def _in_order(lanes: Array) -> Iterator[Array | slice]:
    """Yields the columns in groups, oldest first, such that an environment occurs at most once in each group.

    A batch can hold several trajectories of one environment.
    """
    order = lanes.argsort(kind="stable")
    same = lanes[order]
    begins = np.flatnonzero(np.diff(same, prepend=same[0] - 1))  # start of each lane's columns in sorted order
    place = np.arange(len(lanes))
    turn = np.empty_like(place)
    turn[order] = place - begins.repeat(np.diff(begins, append=len(lanes)))
    if not turn.any():
        yield slice(None)  # all columns, without a copy
        return
    for number in range(int(turn.max()) + 1):
        yield np.flatnonzero(turn == number)
