"""PPO, synchronous or with a lag of one version."""

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
    replace,
)
from echelon.fields import doc
from echelon.presets.registry import register

LagCorrection = Literal["none", "vtrace", "decoupled"]


class PpoConfig(AlgorithmConfig, frozen=True):
    """Clipped PPO with GAE (Schulman et al., 2017)."""

    builder = "echelon.algorithms.ppo:Ppo"

    name: Annotated[Literal["ppo"], doc("the algorithm")] = "ppo"
    gae_lambda: Annotated[float, doc("lambda of generalized advantage estimation", ge=0, le=1)] = 0.95
    clip: Annotated[
        float, doc("clip range of the probability ratio", gt=0, because="with 0, no step has a gradient")
    ] = 0.2
    value_clip: Annotated[float, doc("clip range of the value function; 0: no clipping", ge=0)] = 0.0
    epochs: Annotated[int, doc("passes over each batch", ge=1)] = 4
    minibatches: Annotated[int, doc("minibatches per pass", ge=1)] = 4
    value_weight: ValueWeight = 0.5
    entropy_weight: EntropyWeight = 0.0
    normalize_advantage: NormalizeAdvantage = True
    reward_clip: RewardClip = 0.0
    normalize_reward: NormalizeReward = False
    noise_correlation: NoiseCorrelation = 0.0
    lag_correction: Annotated[
        LagCorrection,
        doc(
            "correction for lag: none; vtrace: V-trace targets and advantages in place of GAE; decoupled: the clip "
            "range is around the learner's policy when the batch arrives, not the policy that acted (docs/async.md)"
        ),
    ] = "none"


@register(PpoConfig)
def ppo(env: EnvId = "CartPole-v1", family: str = "") -> TrainConfig:
    """Clipped PPO, synchronous: actors wait while the learner updates."""
    return TrainConfig(
        preset="ppo",
        env=EnvConfig(id=env),
        actor=ActorConfig(total_envs=16, trajectory=128),
        learner=LearnerConfig(max_lag=0),
        network=NetworkConfig(normalize_observation=True),
        algorithm=PpoConfig(epochs=10, minibatches=8, normalize_reward=True),
        optimizer=OptimizerConfig(learning_rate=5e-4),
    )


@register(PpoConfig)
def async_ppo(env: EnvId = "CartPole-v1", family: str = "") -> TrainConfig:
    """The same algorithm with actors that run ahead by at most one version, corrected for that lag."""
    return replace(
        ppo(env, family), **{"preset": "async-ppo", "learner.max_lag": 1, "algorithm.lag_correction": "decoupled"}
    )
