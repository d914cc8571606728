"""PPO: clipped surrogate with GAE (Schulman et al., 2017, https://arxiv.org/abs/1707.06347).

Differences from the paper: the learner computes the values for advantages and value clipping when the batch arrives;
actors do not store them, so they need no value head, and lagging data gets current values.

`lag_correction` selects what changes for data that an older policy chose. Without lag all three are the same;
docs/async.md compares them with lag.
- none: nothing: the ratio of the surrogate is relative to the policy that acted; advantages and targets are GAE's.
- vtrace: advantages and targets are V-trace's, for the learner's policy when the batch arrives.
- decoupled: the learner's policy when the batch arrives is the proximal policy, to which the ratio is relative, and
  each step is weighted by the ratio of the proximal policy to the policy that acted (Hilton et al., 2022,
  https://arxiv.org/abs/2110.00641). Differences from that paper: the weight is truncated at 1, the proximal policy is
  not an average, and the ratio to the policy that acted stays within twice the clip range. Without this last bound
  every batch repeats the step of those before it, whose effect its data does not show yet, and learning diverges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from echelon.algorithms.actor_critic import Passes
from echelon.algorithms.model import Model
from echelon.algorithms.peers import ALONE, Peers, merged, moments, scaled
from echelon.algorithms.protocol import Loss
from echelon.networks import NetworkOutput, action_mask
from echelon.objectives.policy_gradient import (
    clipped_surrogate,
    clipped_value_loss,
    decoupled_range,
    decoupled_surrogate,
    gae,
    masked_mean,
    masked_normalize,
    value_loss,
    vtrace,
)
from echelon.objectives.statistics import masked_means, value_moments
from echelon.presets.ppo import PpoConfig
from echelon.schema import Batch, Sequences, map_tree


@dataclass(slots=True)
class Minibatch(Sequences):
    """The sequences of a minibatch: (T, B, ...), or (1, N, ...) if the network has no recurrent state.

    `log_prob` is that of the proximal policy, to which the clipped ratio is relative.
    """

    log_rho: torch.Tensor | None  # log ratio of the proximal policy to the one that acted; None if they are the same
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
            whole = whole.map(lambda x, axis: x.flatten(0, axis).unsqueeze(0))  # the steps are independent
        minibatches = self.minibatch_indices(rows, lanes, whole.valid.device)
        if self.config.normalize_advantage:
            yield from self._normalized(whole, minibatches)
        else:
            yield from (whole.select(index) for index in minibatches)

    def _normalized(self, whole: Minibatch, minibatches: Iterator[torch.Tensor]) -> Iterator[Minibatch]:
        """Yields minibatches with advantages normalised over the parts of all learners."""
        if self.peers.size == 1:
            for index in minibatches:
                minibatch = whole.select(index)
                minibatch.advantage = masked_normalize(minibatch.advantage, minibatch.valid)
                yield minibatch
            return
        every = list(minibatches)
        mine = [moments(whole.advantage[:, index], whole.valid[:, index]) for index in every]
        for index, of in zip(every, merged(self.peers.gather(torch.stack(mine))), strict=True):
            minibatch = whole.select(index)
            minibatch.advantage = scaled(minibatch.advantage, minibatch.valid, of)
            yield minibatch

    def _with_advantages(self, batch: Batch) -> Minibatch:
        config = self.config
        with torch.no_grad():
            output = self._evaluate(batch)
            observation = map_tree(lambda x: x[:-1], batch.observation)
            reward_TB, discount_TB = self.rewards(batch.reward), config.discount * (~batch.terminated)
            value_XB = output.value
            log_prob_TB, log_rho_TB = batch.log_prob, None
            if config.lag_correction != "none":
                now_TB = self.model.distribution.log_prob(output.params[:-1], batch.action, action_mask(observation))
                lag_TB = (now_TB - batch.log_prob).masked_fill(~batch.valid, 0.0)
                if config.lag_correction == "decoupled":
                    log_prob_TB, log_rho_TB = now_TB, lag_TB
            if config.lag_correction == "vtrace":
                trace = vtrace(
                    lag_TB,
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
            log_prob=log_prob_TB,
            log_rho=log_rho_TB,
            valid=batch.valid,
            state=batch.state,
            advantage=advantage_TB,
            target=target_TB,
            old_value=value_XB[:-1],
        )

    def _evaluate(self, batch: Batch) -> NetworkOutput:
        """Computes the network on all sequences, in microbatches."""
        parts = batch.split(self.model.microbatches)
        outputs = [self.model.evaluate(part.observation, part.state, part.first) for part in parts]
        params, value = (torch.cat(tensors, 1) for tensors in zip(*((o.params, o.value) for o in outputs), strict=True))
        return NetworkOutput(params, value, ())

    def losses(self, minibatch: Minibatch) -> Iterator[Loss]:
        config, distribution = self.config, self.model.distribution
        output = self.model.evaluate(minibatch.observation, minibatch.state, minibatch.first)
        mask = action_mask(minibatch.observation)
        log_prob = distribution.log_prob(output.params, minibatch.action, mask)
        proximal, advantage, valid = minibatch.log_prob, minibatch.advantage, minibatch.valid
        if minibatch.log_rho is None:
            policy = clipped_surrogate(log_prob, proximal, advantage, valid, config.clip)
        else:
            policy = decoupled_surrogate(log_prob, proximal, minibatch.log_rho, advantage, valid, config.clip)
        if config.value_clip > 0:
            value = clipped_value_loss(output.value, minibatch.old_value, minibatch.target, valid, config.value_clip)
        else:
            value = value_loss(output.value, minibatch.target, valid)
        entropy = masked_mean(distribution.entropy(output.params, mask), valid)
        total = policy + config.value_weight * value - config.entropy_weight * entropy
        shown = {"loss.policy": policy, "loss.value": value, "entropy": entropy}
        columns = value_moments(minibatch.old_value, minibatch.target)
        columns |= _distances((log_prob - proximal).detach(), minibatch.log_rho, config.clip)
        shown |= masked_means(columns, valid)
        yield Loss(total, shown, count=valid.sum())


@torch.no_grad()
def _distances(log_ratio: torch.Tensor, log_rho: torch.Tensor | None, clip: float) -> dict[str, torch.Tensor]:
    """Returns how far policies are apart, per step; KL(q || p) is estimated as in `statistics.divergence`.

    `kl` is KL(acting || current); `clip_fraction` is 1 where the ratio of the current policy to the proximal one is
    outside its range. With `log_rho` the proximal policy did not act: `kl_proximal` is KL(proximal || current), whose
    steps are weighted as in the loss, and `kl_lag` is KL(acting || proximal), which is due to lag alone.
    """
    ratio = log_ratio.exp()
    if log_rho is None:
        outside = (ratio - 1).abs() > clip
        return {"kl": ratio - 1 - log_ratio, "clip_fraction": outside.float()}
    rho, (low, high) = log_rho.exp(), decoupled_range(log_rho, clip)
    outside = (ratio < low) | (ratio > high)
    return {
        "kl": rho * ratio - 1 - (log_rho + log_ratio),
        "kl_proximal": rho.clamp(max=1.0) * (ratio - 1 - log_ratio),
        "kl_lag": rho - 1 - log_rho,
        "clip_fraction": outside.float(),
    }
