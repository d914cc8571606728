"""A3C: actors compute gradients."""

from __future__ import annotations

from typing import Annotated, Literal

from echelon.algorithm_config import (
    AlgorithmConfig,
    EntropyWeight,
    NoiseCorrelation,
    NormalizeAdvantage,
    NormalizeReward,
    RewardClip,
    ValueWeight,
)
from echelon.config import (
    ActorConfig,
    EnvConfig,
    EnvId,
    LearnerConfig,
    NetworkConfig,
    OptimizerConfig,
    TrainConfig,
)
from echelon.fields import doc
from echelon.presets.registry import register


class A3cConfig(AlgorithmConfig, frozen=True):
    """Advantage actor-critic (Mnih et al., 2016): actors send gradients of their own rollouts."""

    builder = "echelon.algorithms.a3c:GradientServer"
    slots = "gradients"

    name: Annotated[Literal["a3c"], doc("the algorithm")] = "a3c"
    gae_lambda: Annotated[
        float, doc("lambda of generalized advantage estimation; 1: the paper's n-step returns", ge=0, le=1)
    ] = 1.0
    minibatches: Annotated[int, doc("parts of each rollout, split by environment; each gives one gradient", ge=1)] = 1
    reduce: Annotated[
        Literal["mean", "sum"], doc("how the learner.batch gradients of one optimizer step are combined")
    ] = "mean"
    value_weight: ValueWeight = 0.5
    entropy_weight: EntropyWeight = 0.01
    normalize_advantage: NormalizeAdvantage = False
    reward_clip: RewardClip = 0.0
    normalize_reward: NormalizeReward = False
    noise_correlation: NoiseCorrelation = 0.0

    @property
    def reaches_learner(self) -> Literal["gradients"]:
        return "gradients"

    @property
    def publishes_reward_scale(self) -> bool:
        return self.normalize_reward


@register(A3cConfig)
def a3c(env: EnvId = "CartPole-v1", family: str = "") -> TrainConfig:
    """Advantage actor-critic: actors compute gradients of their own rollouts, and the learner applies them."""
    return TrainConfig(
        preset="a3c",
        env=EnvConfig(id=env),
        actor=ActorConfig(envs=16, trajectory=20, slots=1),
        learner=LearnerConfig(batch=1),
        network=NetworkConfig(normalize_observation=True),
        algorithm=A3cConfig(gae_lambda=0.95, normalize_reward=True),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
