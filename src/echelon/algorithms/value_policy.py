"""Acting of rules that learn action values: the policy's action, what exploration makes of it, and what it is worth.

Shapes: K rows (environments of a group, or of all that an inference server answers at once).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from echelon.algorithms.exploration import Exploration
from echelon.algorithms.model import Model
from echelon.algorithms.value_networks import Critic
from echelon.networks import action_mask
from echelon.objectives.distributions import Distribution, Greedy, Sample, forbid
from echelon.schema import Tree


class ActionValues(NamedTuple):
    """What an actor needs for the first priorities of its transitions (`objectives.values.initial_priorities`)."""

    chosen: Tensor  # (K,) the value of the action taken
    best: Tensor  # (K,) the value of the action that the policy itself would take


class Choice(NamedTuple):
    """An action, its log-probability (0 where chance had no part in it, or all), and its values if asked for."""

    action: Tensor
    log_prob: Tensor
    values: ActionValues | None


def explore(
    distribution: Distribution,
    params: Tensor,
    generator: torch.Generator,
    mask: Tensor | None,
    exploration: Exploration | None,
) -> Sample:
    """Actions drawn from `params`, changed row by row as `exploration` says."""
    return stray(distribution, distribution.sample(params, generator, mask), generator, mask, exploration)


def stray(
    distribution: Distribution,
    sample: Sample,
    generator: torch.Generator,
    mask: Tensor | None,
    exploration: Exploration | None,
) -> Sample:
    """Actions that somebody drew, changed row by row as `exploration` says."""
    if exploration is None:
        return sample
    action, log_prob = sample
    if exploration.noise is not None:
        noise = torch.empty_like(action).normal_(generator=generator)
        action = torch.addcmul(action, exploration.noise.unsqueeze(-1), noise).clamp_(-1.0, 1.0)
    if exploration.random is None:
        return Sample(action, log_prob)
    strays = torch.rand(exploration.random.shape, generator=generator, device=action.device) < exploration.random
    other = distribution.random(log_prob.new_zeros(len(log_prob), distribution.num_params), generator, mask)
    rows = strays if action.dim() == 1 else strays.unsqueeze(-1)
    return Sample(torch.where(rows, other, action), log_prob.masked_fill(strays, 0.0))


def judge(model: Model, observation: Tree, params: Tensor, action: Tensor, mask: Tensor | None) -> ActionValues | None:
    """What `action` is worth, and the policy's own; None where only the learner could tell."""
    if isinstance(model.distribution, Greedy):
        chosen = params.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return ActionValues(chosen, forbid(params, mask).amax(-1))
    if model.critic is None:
        return None
    critic: Critic = model.critic.network  # type: ignore[assignment]
    features = critic.encoders(observation)
    own = model.distribution.mode(params, mask)
    return ActionValues(critic.judge(features, action).amin(0), critic.judge(features, own).amin(0))


class ValuePolicy:
    """Chooses actions for a group of environments; `with_values` for actors that give transitions their priorities."""

    def __init__(self, model: Model, seed: int, *, with_values: bool = False) -> None:
        self.model, self.with_values = model, with_values
        self.generator = torch.Generator(model.device).manual_seed(seed)

    def act(self, observation: Tree, exploration: Exploration | None = None, *, greedy: bool = False) -> Choice:
        """Actions for one step; leaves of `observation` are (K, ...). `greedy` takes the policy's most likely ones."""
        model, mask = self.model, action_mask(observation)
        with torch.inference_mode():
            params = model.params(observation)
            if greedy:
                action = model.distribution.mode(params, mask)
                sample = Sample(action, model.distribution.log_prob(params, action, mask))
            else:
                sample = explore(model.distribution, params, self.generator, mask, exploration)
            values = judge(model, observation, params, sample.action, mask) if self.with_values else None
            return Choice(sample.action, sample.log_prob, values)
