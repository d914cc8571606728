"""A3C: actors bring gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echelon.algorithm_config import AlgorithmConfig
from echelon.bounds import at_least, fractions
from echelon.config import (
    ActorConfig,
    EnvConfig,
    LearnerConfig,
    OptimizerConfig,
    TrainConfig,
)
from echelon.presets.registry import is_atari, register


@dataclass(frozen=True)
class A3cConfig(AlgorithmConfig):
    """Advantage actor-critic (Mnih et al., 2016): actors bring the gradients of their own rollouts."""

    builder = "echelon.algorithms.a3c:GradientServer"
    slots = "gradients"

    name: Literal["a3c"] = "a3c"
    gae_lambda: float = 1.0  # 1: the paper's n-step returns
    minibatches: int = 1  # pieces of each rollout, by environment; every one brings a gradient
    reduce: Literal["mean", "sum"] = "mean"  # of the learner.batch gradients that make one step
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    normalize_advantage: bool = False
    normalize_reward: bool = False

    @property
    def publishes_reward_scale(self) -> bool:
        return self.normalize_reward

    def __post_init__(self) -> None:
        super().__post_init__()
        fractions(self, "algorithm", "gae_lambda")
        at_least(self, "algorithm", minibatches=1, value_weight=0)


@register
def a3c(env: str = "CartPole-v1") -> TrainConfig:
    """Advantage actor-critic: actors learn from their own rollouts and bring gradients, each a step of the weights."""
    if is_atari(env):
        return TrainConfig(
            preset="a3c",
            env=EnvConfig(id=env),
            actor=ActorConfig(envs=16, trajectory=20, slots=1),
            learner=LearnerConfig(batch=1),
            algorithm=A3cConfig(reward_clip=1.0),
            optimizer=OptimizerConfig(learning_rate=3e-4),
        )
    return TrainConfig(
        preset="a3c",
        env=EnvConfig(id=env),
        actor=ActorConfig(envs=16, trajectory=20, slots=1),
        learner=LearnerConfig(batch=1),
        algorithm=A3cConfig(gae_lambda=0.95, normalize_reward=True),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
