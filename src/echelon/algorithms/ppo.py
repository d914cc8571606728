"""PPO: clipped surrogate with GAE (Schulman et al., 2017, https://arxiv.org/abs/1707.06347).

Differences from the paper: the learner computes the values for advantages and value clipping when the batch arrives;
actors do not store them, so they need no value head, and lagging data gets current values. With `correct_lag`
(async-ppo) advantages and targets are V-trace's, which equal GAE's for data without lag (rho = c = 1). With and
without `correct_lag`, the ratio of the surrogate is relative to the policy that acted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from echelon.algorithms.actor_critic import Passes
from echelon.algorithms.model import Model
from echelon.algorithms.peers import ALONE, Peers, merged, moments, scaled
from echelon.algorithms.protocol import Loss
from echelon.networks import action_mask
from echelon.objectives.policy_gradient import (
    clipped_surrogate,
    clipped_value_loss,
    gae,
    masked_mean,
    masked_normalize,
    value_loss,
    vtrace,
)
from echelon.presets.ppo import PpoConfig
from echelon.schema import Batch, Tree, map_tree


@dataclass(slots=True)
class Minibatch:
    """The sequences of a minibatch: (T, B, ...), or (1, N, ...) if the network has no recurrent state."""

    observation: Tree
    first: torch.Tensor
    action: torch.Tensor
    log_prob: torch.Tensor
    valid: torch.Tensor
    state: tuple[torch.Tensor, ...]
    advantage: torch.Tensor
    target: torch.Tensor
    old_value: torch.Tensor


class Ppo(Passes):
    """Several epochs over each batch, in minibatches."""

    def __init__(self, config: PpoConfig, model: Model, seed: int, peers: Peers = ALONE) -> None:
        super().__init__(config, model, seed, peers)
        self.config = config

    def minibatches(self, batch: Batch) -> Iterator[Minibatch]:
        whole = self._with_advantages(batch)
        rows, lanes = batch.valid.shape
        if self.model.network.state_shapes:
            rows = 1
        else:
            whole = _as_one_row(whole)
        minibatches = self.minibatch_indices(rows, lanes, whole.valid.device)
        if self.config.normalize_advantage:
            yield from self._normalized(whole, minibatches)
        else:
            yield from (_lanes(whole, index) for index in minibatches)

    def _normalized(self, whole: Minibatch, minibatches: Iterator[torch.Tensor]) -> Iterator[Minibatch]:
        """Yields minibatches with advantages normalised over the parts of all learners."""
        if self.peers.size == 1:
            for index in minibatches:
                minibatch = _lanes(whole, index)
                minibatch.advantage = masked_normalize(minibatch.advantage, minibatch.valid)
                yield minibatch
            return
        every = list(minibatches)
        mine = [moments(whole.advantage[:, index], whole.valid[:, index]) for index in every]
        for index, of in zip(every, merged(self.peers.gather(torch.stack(mine))), strict=True):
            minibatch = _lanes(whole, index)
            minibatch.advantage = scaled(minibatch.advantage, minibatch.valid, of)
            yield minibatch

    def _with_advantages(self, batch: Batch) -> Minibatch:
        config = self.config
        with torch.no_grad():
            output = self.model.evaluate(batch.observation, batch.state, batch.first)
            observation = map_tree(lambda x: x[:-1], batch.observation)
            reward_TB, discount_TB = self.rewards(batch.reward), config.discount * (~batch.terminated)
            value_XB = output.value
            if config.correct_lag:
                mask = action_mask(observation)
                now_TB = self.model.distribution.log_prob(output.params[:-1], batch.action, mask)
                trace = vtrace(
                    now_TB - batch.log_prob,
                    reward_TB,
                    discount_TB,
                    value_XB,
                    batch.valid,
                    rho_clip=1.0,
                    c_clip=1.0,
                    trace_lambda=config.gae_lambda,
                )
                target_TB = trace.target_TB
                # The surrogate applies each step's own ratio, so the advantage includes only those of later steps.
                later_TB = torch.zeros_like(target_TB)
                later_TB[:-1] = config.gae_lambda * (target_TB[1:] - value_XB[1:-1])
                ahead_TB = reward_TB + discount_TB * (value_XB[1:] + later_TB) - value_XB[:-1]
                advantage_TB = ahead_TB.masked_fill(~batch.valid, 0.0)
            else:
                advantage_TB = gae(reward_TB, discount_TB, value_XB, batch.valid, config.gae_lambda)
                target_TB = advantage_TB + value_XB[:-1]
        return Minibatch(
            observation=observation,
            first=batch.first[:-1],
            action=batch.action,
            log_prob=batch.log_prob,
            valid=batch.valid,
            state=batch.state,
            advantage=advantage_TB,
            target=target_TB,
            old_value=value_XB[:-1],
        )

    def losses(self, minibatch: Minibatch) -> Iterator[Loss]:
        config, distribution = self.config, self.model.distribution
        output = self.model.evaluate(minibatch.observation, minibatch.state, minibatch.first)
        mask = action_mask(minibatch.observation)
        log_prob = distribution.log_prob(output.params, minibatch.action, mask)
        policy = clipped_surrogate(log_prob, minibatch.log_prob, minibatch.advantage, minibatch.valid, config.clip)
        if config.value_clip > 0:
            value = clipped_value_loss(
                output.value, minibatch.old_value, minibatch.target, minibatch.valid, config.value_clip
            )
        else:
            value = value_loss(output.value, minibatch.target, minibatch.valid)
        entropy = masked_mean(distribution.entropy(output.params, mask), minibatch.valid)
        total = policy + config.value_weight * value - config.entropy_weight * entropy
        with torch.no_grad():
            log_ratio = log_prob - minibatch.log_prob
            ratio = log_ratio.exp()
            divergence = masked_mean(ratio - 1 - log_ratio, minibatch.valid)
        shown = {"policy_loss": policy, "value_loss": value, "entropy": entropy, "divergence": divergence}
        yield Loss(total, shown, count=minibatch.valid.sum() if self.peers.size > 1 else 1)


def _map(minibatch: Minibatch, sequence: Any, lane: Any) -> Minibatch:
    """Applies `sequence` to the (T, B, ...) tensors of `minibatch` and `lane` to its (B, ...) tensors."""
    return Minibatch(
        observation=map_tree(sequence, minibatch.observation),
        first=sequence(minibatch.first),
        action=sequence(minibatch.action),
        log_prob=sequence(minibatch.log_prob),
        valid=sequence(minibatch.valid),
        state=tuple(lane(leaf) for leaf in minibatch.state),
        advantage=sequence(minibatch.advantage),
        target=sequence(minibatch.target),
        old_value=sequence(minibatch.old_value),
    )


def _lanes(minibatch: Minibatch, index: torch.Tensor) -> Minibatch:
    return _map(minibatch, lambda x: x.index_select(1, index), lambda x: x.index_select(0, index))


def _as_one_row(minibatch: Minibatch) -> Minibatch:
    """Reshapes (T, B, ...) to (1, T*B, ...): without recurrent state the steps are independent."""
    return _map(minibatch, lambda x: x.flatten(0, 1).unsqueeze(0), lambda x: x)
