"""The values by which learning rules differ: one frozen dataclass a rule, the `algorithm` section of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from echelon.bounds import above_zero, at_least, fractions, parts, require


@dataclass(frozen=True, slots=True)
class ImpalaConfig:
    """V-trace actor-critic (Espeholt et al., 2018)."""

    name: Literal["impala"] = "impala"
    discount: float = 0.99
    rho_clip: float = 1.0
    c_clip: float = 1.0
    trace_lambda: float = 1.0
    epochs: int = 1  # passes over each batch; V-trace corrects for the later ones too
    minibatches: int = 1  # pieces of each pass, by environment
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    normalize_advantage: bool = False
    reward_clip: float = 0.0  # 0: none; 1: to [-1, 1] as on Atari
    normalize_reward: bool = False

    def __post_init__(self) -> None:
        fractions(self, "algorithm", "discount", "trace_lambda")
        at_least(self, "algorithm", epochs=1, minibatches=1, rho_clip=0, c_clip=0, value_weight=0, reward_clip=0)


@dataclass(frozen=True, slots=True)
class PpoConfig:
    """Clipped PPO with GAE (Schulman et al., 2017)."""

    name: Literal["ppo"] = "ppo"
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    value_clip: float = 0.0  # 0: off
    epochs: int = 4
    minibatches: int = 4
    value_weight: float = 0.5
    entropy_weight: float = 0.0
    normalize_advantage: bool = True
    reward_clip: float = 0.0
    normalize_reward: bool = False
    correct_lag: bool = False  # V-trace targets and advantages in place of GAE, for data that lags

    def __post_init__(self) -> None:
        fractions(self, "algorithm", "discount", "gae_lambda")
        require(self.clip > 0, f"algorithm.clip={self.clip} must be above 0: no step would ever be learned from.")
        at_least(self, "algorithm", epochs=1, minibatches=1, value_clip=0, value_weight=0, reward_clip=0)


@dataclass(frozen=True, slots=True)
class A3cConfig:
    """Advantage actor-critic (Mnih et al., 2016): actors bring the gradients of their own rollouts."""

    name: Literal["a3c"] = "a3c"
    discount: float = 0.99
    gae_lambda: float = 1.0  # 1: the paper's n-step returns
    minibatches: int = 1  # pieces of each rollout, by environment; every one brings a gradient
    reduce: Literal["mean", "sum"] = "mean"  # of the learner.batch gradients that make one step
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    normalize_advantage: bool = False
    reward_clip: float = 0.0
    normalize_reward: bool = False

    def __post_init__(self) -> None:
        fractions(self, "algorithm", "discount", "gae_lambda")
        at_least(self, "algorithm", minibatches=1, value_weight=0, reward_clip=0)


@dataclass(frozen=True, slots=True)
class DqnConfig:
    """Double Q-learning (van Hasselt et al., 2016), dueling (Wang et al., 2016)."""

    name: Literal["dqn"] = "dqn"
    discount: float = 0.99
    double: bool = True
    dueling: bool = True
    huber: float = 1.0  # TD errors beyond it count linearly; 0: all are squared
    target_period: int = 500  # updates between copies to the target network; 0: it follows by target_tau
    target_tau: float = 0.0  # the part of the way that the target network goes at every update
    epsilon_start: float = 1.0  # chance of a random action at the first step ...
    epsilon_end: float = 0.05
    epsilon_steps: int = 10_000  # ... falls in a straight line over so many environment steps
    epsilon_ladder: bool = False  # environment i of N ends at 0.4^(1 + 7i/(N-1)) instead (Ape-X)
    reward_clip: float = 0.0  # of single rewards, before they are summed over n steps

    def __post_init__(self) -> None:
        fractions(self, "algorithm", "discount", "target_tau", "epsilon_start", "epsilon_end")
        at_least(self, "algorithm", huber=0, target_period=0, epsilon_steps=0, reward_clip=0)
        require(
            (self.target_period > 0) != (self.target_tau > 0),
            f"algorithm.target_period={self.target_period} and algorithm.target_tau={self.target_tau}: the target "
            "network is copied every so many updates or follows by a part of the way. Set one, and the other to 0.",
        )


@dataclass(frozen=True, slots=True)
class DdpgConfig:
    """Deterministic policy gradients (Lillicrap et al., 2016); TD3 (Fujimoto et al., 2018) by its values."""

    name: Literal["ddpg"] = "ddpg"
    discount: float = 0.99
    num_critics: int = 1  # TD3: 2, of which the lower counts
    policy_delay: int = 1  # critic updates per policy update; TD3: 2
    target_noise: float = 0.0  # on the actions that targets are computed from; TD3: 0.2
    target_noise_clip: float = 0.5
    target_tau: float = 0.005
    critic_learning_rate: float = 1e-3  # the policy's is optimizer.learning_rate
    huber: float = 0.0  # TD errors beyond it count linearly; 0: all are squared
    noise: float = 0.1  # deviation of the noise that actors add, in units of half the action range
    noise_ladder: float = 0.0  # else than 0: the noise falls to this from the first environment to the last
    random_steps: int = 1_000  # environment steps with actions drawn at random, before the policy acts
    publish_critic: bool = False  # actors get the critic too, for the priorities of what they store
    reward_clip: float = 0.0  # of single rewards, before they are summed over n steps

    def __post_init__(self) -> None:
        fractions(self, "algorithm", "discount")
        at_least(self, "algorithm", num_critics=1, policy_delay=1, target_noise=0, target_noise_clip=0, huber=0)
        at_least(self, "algorithm", noise=0, noise_ladder=0, random_steps=0, reward_clip=0)
        above_zero(self, "algorithm", "critic_learning_rate")
        parts(self, "algorithm", "target_tau")
        require(
            self.noise_ladder <= self.noise,
            f"algorithm.noise_ladder={self.noise_ladder} exceeds algorithm.noise={self.noise}, from which it falls.",
        )


@dataclass(frozen=True, slots=True)
class SacConfig:
    """Soft actor-critic with a learned temperature (Haarnoja et al., 2018), for continuous and discrete actions."""

    name: Literal["sac"] = "sac"
    discount: float = 0.99
    num_critics: int = 2
    target_tau: float = 0.005
    critic_learning_rate: float = 1e-3  # the policy's is optimizer.learning_rate
    temperature: float = 1.0  # what entropy is worth; the first value where it is learned
    learn_temperature: bool = True
    temperature_learning_rate: float = 1e-3
    target_entropy: float | None = None  # none: -(action components), or 0.98 of a uniform choice's if discrete
    random_steps: int = 1_000  # environment steps with actions drawn at random, before the policy acts
    reward_clip: float = 0.0  # of single rewards, before they are summed over n steps

    def __post_init__(self) -> None:
        fractions(self, "algorithm", "discount")
        at_least(self, "algorithm", num_critics=1, random_steps=0, reward_clip=0)
        above_zero(self, "algorithm", "temperature", "critic_learning_rate", "temperature_learning_rate")
        parts(self, "algorithm", "target_tau")
        require(
            self.target_entropy is None or math.isfinite(self.target_entropy),
            f"algorithm.target_entropy={self.target_entropy} must be a finite number, or none for the usual one.",
        )


@dataclass(frozen=True, slots=True)
class OwnConfig:
    """A rule that the user brings, as an object that acts and learns by itself (`AsyncLearningNode`)."""

    name: Literal["own"] = "own"
    discount: float = 0.99
    reward_clip: float = 0.0  # of single rewards, before they are summed over n steps

    def __post_init__(self) -> None:
        fractions(self, "algorithm", "discount")
        at_least(self, "algorithm", reward_clip=0)


AlgorithmConfig = ImpalaConfig | PpoConfig | A3cConfig | DqnConfig | DdpgConfig | SacConfig | OwnConfig
