"""A3C: actors bring gradients."""

from __future__ import annotations

from typing import Annotated, Literal

from echelon.algorithm_config import AlgorithmConfig
from echelon.config import (
    ActorConfig,
    EnvConfig,
    LearnerConfig,
    OptimizerConfig,
    TrainConfig,
)
from echelon.fields import doc
from echelon.presets.registry import is_atari, register


class A3cConfig(AlgorithmConfig, frozen=True):
    """Advantage actor-critic (Mnih et al., 2016): actors bring the gradients of their own rollouts."""

    builder = "echelon.algorithms.a3c:GradientServer"
    slots = "gradients"

    name: Annotated[Literal["a3c"], doc("the learning rule")] = "a3c"
    gae_lambda: Annotated[float, doc("decay of advantage estimation; 1: the paper's n-step returns", ge=0, le=1)] = 1.0
    minibatches: Annotated[int, doc("pieces of each rollout, by environment; each brings a gradient", ge=1)] = 1
    reduce: Annotated[Literal["mean", "sum"], doc("of the learner.batch gradients that make one step")] = "mean"
    value_weight: Annotated[float, doc("weight of the value loss", ge=0)] = 0.5
    entropy_weight: Annotated[float, doc("weight of the entropy bonus")] = 0.01
    normalize_advantage: Annotated[bool, doc("to mean 0 and deviation 1 in each piece")] = False
    reward_clip: Annotated[float, doc("largest size of a single reward; 0: any, 1: as usual on Atari", ge=0)] = 0.0
    normalize_reward: Annotated[bool, doc("divide rewards by the running deviation of returns")] = False

    @property
    def reaches_learner(self) -> Literal["gradients"]:
        return "gradients"

    @property
    def publishes_reward_scale(self) -> bool:
        return self.normalize_reward


@register(A3cConfig)
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
