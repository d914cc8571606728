"""PPO, synchronous and with a lag of one version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echelon.algorithm_config import AlgorithmConfig
from echelon.bounds import at_least, fractions, require
from echelon.config import (
    ActorConfig,
    EnvConfig,
    LearnerConfig,
    NetworkConfig,
    OptimizerConfig,
    TrainConfig,
    replace,
)
from echelon.presets.registry import is_atari, register


@dataclass(frozen=True)
class PpoConfig(AlgorithmConfig):
    """Clipped PPO with GAE (Schulman et al., 2017)."""

    builder = "echelon.algorithms.ppo:Ppo"

    name: Literal["ppo"] = "ppo"
    gae_lambda: float = 0.95
    clip: float = 0.2
    value_clip: float = 0.0  # 0: off
    epochs: int = 4
    minibatches: int = 4
    value_weight: float = 0.5
    entropy_weight: float = 0.0
    normalize_advantage: bool = True
    normalize_reward: bool = False
    correct_lag: bool = False  # V-trace targets and advantages in place of GAE, for data that lags

    def __post_init__(self) -> None:
        super().__post_init__()
        fractions(self, "algorithm", "gae_lambda")
        require(self.clip > 0, f"algorithm.clip={self.clip} must be above 0: no step would ever be learned from.")
        at_least(self, "algorithm", epochs=1, minibatches=1, value_clip=0, value_weight=0)


@register
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


@register
def async_ppo(env: str = "CartPole-v1") -> TrainConfig:
    """The same rule while actors run ahead by at most one version, corrected for that lag."""
    return replace(ppo(env), **{"preset": "async-ppo", "learner.max_lag": 1, "algorithm.correct_lag": True})
