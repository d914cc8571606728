"""Exploration: random actions and action noise, per row, as an inference server serves many actors in one batch.

Noise can be correlated in time, so that it moves an environment further than independent noise, whose effects cancel
(`algorithm.noise_correlation`). It is the same process for the noise of a Gaussian policy, which `Policy` keeps, and
for the noise that is added to the actions of a deterministic one, which `ActionNoise` keeps.

Shapes: K rows (environments).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from echelon.config import AlgorithmConfig
from echelon.names import resolve
from echelon.objectives.distributions import Distribution, Sample
from echelon.presets.ddpg import DdpgConfig
from echelon.presets.dqn import DqnConfig
from echelon.presets.sac import SacConfig

LADDER_BASE, LADDER_EXPONENT = 0.4, 7.0  # Horgan et al. (2018), section 4.1


def next_noise(last: Tensor, correlation: float, rng: torch.Generator) -> Tensor:
    """Returns the noise after `last`: every entry is a stationary AR(1) process with unit variance,

        eps_t = rho eps_{t-1} + sqrt(1 - rho^2) xi_t,  xi_t ~ N(0, 1).

    The density of eps_t alone is the standard normal one for every rho, so the density of an action, and its stored
    log-probability, do not depend on `correlation`. Hollenstein et al. (2024, https://arxiv.org/abs/2312.11091) use
    coloured noise for PPO in the same way. An Ornstein-Uhlenbeck process with step theta has rho = 1 - theta. An entry
    of 0 starts a process. Processes go on over the ends of episodes.
    """
    fresh = torch.empty_like(last).normal_(generator=rng)
    return torch.where(last == 0.0, fresh, correlation * last + math.sqrt(1.0 - correlation**2) * fresh)


class NoiseProcess:
    """The noise of K rows, step by step."""

    def __init__(self, correlation: float) -> None:
        self.correlation = correlation
        self.last: Tensor | None = None

    def draw(self, like: Tensor, rng: torch.Generator) -> Tensor:
        """Returns the noise of the next step, in the shape of `like`."""
        self.last = next_noise(torch.zeros_like(like) if self.last is None else self.last, self.correlation, rng)
        return self.last


@dataclass(frozen=True, slots=True)
class Exploration:
    """How the actions of K rows are changed."""

    random: Tensor | None = None  # (K,) probability of a random action
    noise: Tensor | None = None  # (K,) standard deviation of the noise added to a continuous action
    process: NoiseProcess | None = None  # of that noise; None: independent at every step

    def draw_random_rows(self, rng: torch.Generator) -> Tensor | None:
        """Draws the rows that take a random action, (K,) of bool; None: none of them can."""
        if self.random is None:
            return None
        return torch.rand(self.random.shape, generator=rng, device=self.random.device) < self.random

    def apply(
        self,
        distribution: Distribution,
        sample: Sample,
        rng: torch.Generator,
        mask: Tensor | None = None,
        is_random: Tensor | None = None,
    ) -> Sample:
        """Returns the policy's actions with exploration applied per row; draws `is_random` if it is not given."""
        action, log_prob = sample
        if self.noise is not None:
            process = self.process
            noise = process.draw(action, rng) if process else torch.empty_like(action).normal_(generator=rng)
            action = torch.addcmul(action, self.noise.unsqueeze(-1), noise).clamp_(-1.0, 1.0)
        if is_random is None:
            is_random = self.draw_random_rows(rng)
        if is_random is None:
            return Sample(action, log_prob)
        other = distribution.random(log_prob.new_zeros(len(log_prob), distribution.num_params), rng, mask)
        rows = is_random if action.dim() == 1 else is_random.unsqueeze(-1)
        return Sample(torch.where(rows, other, action), log_prob.masked_fill(is_random, 0.0))


def epsilon_ladder(num_envs: int) -> Tensor:
    """Returns the final epsilon of every environment of a run, from much exploration to almost none."""
    return LADDER_BASE ** (1.0 + LADDER_EXPONENT * _places(num_envs))


def noise_ladder(num_envs: int, first: float, last: float) -> Tensor:
    """Returns the noise of every environment of a run, geometrically spaced from `first` to `last`."""
    return first * (last / first) ** _places(num_envs)


def _places(num_envs: int) -> Tensor:
    return torch.arange(num_envs) / max(num_envs - 1, 1)


class Rule(Protocol):
    """The exploration of an algorithm, constructed as rule(config, envs, num_envs) with the arguments of `Explorer`."""

    def at(self, env_steps: int) -> Exploration | None: ...


class Explorer:
    """The exploration of some environments of a run, as a function of the run's steps."""

    def __init__(self, config: AlgorithmConfig, envs: Sequence[int], num_envs: int) -> None:
        """`envs` are the indices of these environments among the `num_envs` of the whole run."""
        make: Any = resolve(config.exploration) if config.exploration else None
        self.rule: Rule | None = make and make(config, envs, num_envs)

    def at(self, env_steps: int) -> Exploration | None:
        """Returns the exploration after `env_steps` steps of the whole run; None: the policy explores by itself."""
        return self.rule.at(env_steps) if self.rule is not None else None


class EpsilonGreedy:
    """Epsilon-greedy: epsilon decays to one value, or linearly to a ladder of values over the environments."""

    def __init__(self, config: DqnConfig, envs: Sequence[int], num_envs: int) -> None:
        ones = torch.ones(len(envs))
        ladder = epsilon_ladder(num_envs)[torch.tensor(envs)] if config.epsilon_ladder else None
        self.first, self.last = config.epsilon_start * ones, config.epsilon_end * ones if ladder is None else ladder
        self.config, self.num_steps = config, config.epsilon_steps

    def at(self, env_steps: int) -> Exploration:
        if self.config.epsilon_decay and (epsilon := self.config.epsilon(env_steps)) is not None:
            return Exploration(torch.full_like(self.first, epsilon))
        fallen = min(env_steps / self.num_steps, 1.0) if self.num_steps else 1.0
        return Exploration(torch.lerp(self.first, self.last, fallen))


class RandomStart:
    """Random actions at the start; afterwards the policy explores by itself."""

    def __init__(self, config: SacConfig | DdpgConfig, envs: Sequence[int], num_envs: int) -> None:
        del num_envs
        self.ones, self.num_steps = torch.ones(len(envs)), config.random_steps

    def at(self, env_steps: int) -> Exploration | None:
        return Exploration(self.ones) if env_steps < self.num_steps else None


class ActionNoise(RandomStart):
    """Random actions at the start; afterwards noise on every action, equal for all environments or on a ladder."""

    def __init__(self, config: DdpgConfig, envs: Sequence[int], num_envs: int) -> None:
        super().__init__(config, envs, num_envs)
        last = config.noise_ladder or config.noise
        ladder = noise_ladder(num_envs, config.noise, last) if config.noise else torch.zeros(num_envs)
        self.noise = ladder[torch.tensor(envs)]
        self.process = NoiseProcess(config.noise_correlation) if config.noise_correlation else None

    def at(self, env_steps: int) -> Exploration:
        return Exploration(self.ones if env_steps < self.num_steps else None, self.noise, self.process)
