"""PPO, synchronous or with a lag of one version."""

from __future__ import annotations

from typing import Annotated, Literal

from echelon.algorithm_config import (
    AlgorithmConfig,
    EntropyWeight,
    NormalizeAdvantage,
    NormalizeReward,
    RewardClip,
    ValueWeight,
)
from echelon.config import (
    ActorConfig,
    EnvConfig,
    EvaluationConfig,
    LearnerConfig,
    NetworkConfig,
    OptimizerConfig,
    TrainConfig,
    replace,
)
from echelon.families import is_atari
from echelon.fields import doc
from echelon.presets.registry import is_mario, register


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
    correct_lag: Annotated[bool, doc("use V-trace targets and advantages in place of GAE, to correct for lag")] = False


@register(PpoConfig)
def ppo(env: str = "CartPole-v1") -> TrainConfig:
    """Clipped PPO, synchronous: actors wait while the learner updates."""
    if is_mario(env):  # async-ppo clears World 1-1 with these values (docs/mario.md)
        return TrainConfig(
            preset="ppo",
            env=EnvConfig(id=env, kwargs={"actions": "two", "noop_max": 30}),
            actor=ActorConfig(envs=4, trajectory=32),
            learner=LearnerConfig(batch=16, max_lag=0),
            algorithm=PpoConfig(discount=0.95, epochs=8, minibatches=8, entropy_weight=0.01, normalize_reward=True),
            optimizer=OptimizerConfig(learning_rate=3e-4, schedule="linear"),
            evaluation=EvaluationConfig(interval_s=0.0),  # an evaluator would take a core from the emulators
        )
    if is_atari(env):
        return TrainConfig(
            preset="ppo",
            env=EnvConfig(id=env),
            actor=ActorConfig(envs=8, trajectory=128),
            learner=LearnerConfig(max_lag=0),
            algorithm=PpoConfig(clip=0.1, entropy_weight=0.01, reward_clip=1.0),
            optimizer=OptimizerConfig(learning_rate=2.5e-4),
        )
    return TrainConfig(
        preset="ppo",
        env=EnvConfig(id=env),
        actor=ActorConfig(envs=8, trajectory=128),
        learner=LearnerConfig(max_lag=0),
        network=NetworkConfig(),
        algorithm=PpoConfig(epochs=10, minibatches=8),
        optimizer=OptimizerConfig(learning_rate=5e-4),
    )


@register(PpoConfig)
def async_ppo(env: str = "CartPole-v1") -> TrainConfig:
    """The same algorithm with actors that run ahead by at most one version, corrected for that lag."""
    return replace(ppo(env), **{"preset": "async-ppo", "learner.max_lag": 1, "algorithm.correct_lag": True})
