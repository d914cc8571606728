"""How far actors stray from their policy, row by row: an inference server answers many actors at once.

Shapes: K rows (environments).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.config import AlgorithmConfig, DdpgConfig, DqnConfig, SacConfig
from echelon.objectives.distributions import Distribution, Sample

LADDER_BASE, LADDER_EXPONENT = 0.4, 7.0  # Horgan et al. (2018), section 4.1


@dataclass(frozen=True, slots=True)
class Exploration:
    """What is done to the actions of K rows."""

    random: Tensor | None = None  # (K,) the chance that an action is drawn at random instead
    noise: Tensor | None = None  # (K,) the deviation of the noise added to a continuous action

    def apply(
        self, distribution: Distribution, sample: Sample, rng: torch.Generator, mask: Tensor | None = None
    ) -> Sample:
        """Actions that somebody drew, changed row by row."""
        action, log_prob = sample
        if self.noise is not None:
            noise = torch.empty_like(action).normal_(generator=rng)
            action = torch.addcmul(action, self.noise.unsqueeze(-1), noise).clamp_(-1.0, 1.0)
        if self.random is None:
            return Sample(action, log_prob)
        strays = torch.rand(self.random.shape, generator=rng, device=action.device) < self.random
        other = distribution.random(log_prob.new_zeros(len(log_prob), distribution.num_params), rng, mask)
        rows = strays if action.dim() == 1 else strays.unsqueeze(-1)
        return Sample(torch.where(rows, other, action), log_prob.masked_fill(strays, 0.0))


def epsilon_ladder(num_envs: int) -> Tensor:
    """The chances of a random action over all environments of a run: some explore much, some hardly at all."""
    return LADDER_BASE ** (1.0 + LADDER_EXPONENT * _places(num_envs))


def noise_ladder(num_envs: int, first: float, last: float) -> Tensor:
    """Deviations from `first` to `last` over all environments of a run, evenly spaced by their ratio."""
    return first * (last / first) ** _places(num_envs)


def _places(num_envs: int) -> Tensor:
    return torch.arange(num_envs) / max(num_envs - 1, 1)


class Explorer:
    """The exploration of some environments of a run, by the steps that the run has made."""

    def __init__(self, config: AlgorithmConfig, envs: Sequence[int], num_envs: int) -> None:
        """`envs` are the numbers of these environments among the `num_envs` of the whole run."""
        self.config = config
        self.ones = torch.ones(len(envs))
        rows = torch.tensor(envs)
        self.random = self.noise = self.ones
        if isinstance(config, DqnConfig):  # the chance of a random action that each ends at
            self.random = epsilon_ladder(num_envs)[rows] if config.epsilon_ladder else self.ones * config.epsilon_end
        if isinstance(config, DdpgConfig):
            last = config.noise_ladder or config.noise
            self.noise = noise_ladder(num_envs, config.noise, last)[rows] if config.noise else 0.0 * self.ones

    def at(self, env_steps: int) -> Exploration | None:
        """What holds after `env_steps` steps of all environments together; None: the policy itself explores."""
        match self.config:
            case DqnConfig():
                first = self.config.epsilon_start * self.ones
                return Exploration(torch.lerp(first, self.random, fallen(self.config, env_steps)))
            case DdpgConfig():
                return Exploration(self.ones if env_steps < self.config.random_steps else None, self.noise)
            case SacConfig() if env_steps < self.config.random_steps:
                return Exploration(self.ones)
            case _:
                return None


def fallen(config: DqnConfig, env_steps: int) -> float:
    """How far the chance of a random action has come from its first value (0) to its last (1)."""
    return min(env_steps / config.epsilon_steps, 1.0) if config.epsilon_steps else 1.0
