"""PPO, synchronous and with a lag of one version."""

from __future__ import annotations

from typing import Annotated, Literal

from echelon.algorithm_config import AlgorithmConfig
from echelon.config import (
    ActorConfig,
    EnvConfig,
    LearnerConfig,
    NetworkConfig,
    OptimizerConfig,
    TrainConfig,
    replace,
)
from echelon.fields import doc
from echelon.presets.registry import is_atari, register


class PpoConfig(AlgorithmConfig, frozen=True):
    """Clipped PPO with GAE (Schulman et al., 2017)."""

    builder = "echelon.algorithms.ppo:Ppo"

    name: Annotated[Literal["ppo"], doc("the learning rule")] = "ppo"
    gae_lambda: Annotated[float, doc("decay of generalized advantage estimation", ge=0, le=1)] = 0.95
    clip: Annotated[
        float, doc("largest change of a probability ratio", gt=0, because="no step would ever be learned from")
    ] = 0.2
    value_clip: Annotated[float, doc("largest change of a value; 0: any", ge=0)] = 0.0
    epochs: Annotated[int, doc("passes over each batch", ge=1)] = 4
    minibatches: Annotated[int, doc("pieces of each pass", ge=1)] = 4
    value_weight: Annotated[float, doc("weight of the value loss", ge=0)] = 0.5
    entropy_weight: Annotated[float, doc("weight of the entropy bonus")] = 0.0
    normalize_advantage: Annotated[bool, doc("to mean 0 and deviation 1 in each minibatch")] = True
    reward_clip: Annotated[float, doc("largest size of a single reward; 0: any, 1: as usual on Atari", ge=0)] = 0.0
    normalize_reward: Annotated[bool, doc("divide rewards by the running deviation of returns")] = False
    correct_lag: Annotated[bool, doc("V-trace targets and advantages in place of GAE, for data that lags")] = False


@register(PpoConfig)
def ppo(env: str = "CartPole-v1") -> TrainConfig:
    """Clipped PPO, synchronous: actors wait while the learner learns."""
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
    """The same rule while actors run ahead by at most one version, corrected for that lag."""
    return replace(ppo(env), **{"preset": "async-ppo", "learner.max_lag": 1, "algorithm.correct_lag": True})
