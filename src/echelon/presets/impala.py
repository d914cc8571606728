"""IMPALA: V-trace corrects for actors that lag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echelon.algorithm_config import AlgorithmConfig
from echelon.bounds import at_least, fractions
from echelon.config import (
    ActorConfig,
    EnvConfig,
    OptimizerConfig,
    TrainConfig,
)
from echelon.presets.registry import is_atari, register


@dataclass(frozen=True)
class ImpalaConfig(AlgorithmConfig):
    """V-trace actor-critic (Espeholt et al., 2018)."""

    builder = "echelon.algorithms.impala:Impala"

    name: Literal["impala"] = "impala"
    rho_clip: float = 1.0
    c_clip: float = 1.0
    trace_lambda: float = 1.0
    epochs: int = 1  # passes over each batch; V-trace corrects for the later ones too
    minibatches: int = 1  # pieces of each pass, by environment
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    normalize_advantage: bool = False
    normalize_reward: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        fractions(self, "algorithm", "trace_lambda")
        at_least(self, "algorithm", epochs=1, minibatches=1, rho_clip=0, c_clip=0, value_weight=0)


@register
def impala(env: str = "CartPole-v1") -> TrainConfig:
    """V-trace actor-critic: actors never wait for the learner, which corrects for their lag."""
    if is_atari(env):
        return TrainConfig(
            preset="impala",
            env=EnvConfig(id=env),
            actor=ActorConfig(envs=16, trajectory=20, slots=2),
            algorithm=ImpalaConfig(reward_clip=1.0, entropy_weight=0.01),
            optimizer=OptimizerConfig(learning_rate=3e-4, clip_norm=0.5),
        )
    return TrainConfig(
        preset="impala",
        env=EnvConfig(id=env),
        actor=ActorConfig(envs=32, trajectory=20, slots=2),
        algorithm=ImpalaConfig(entropy_weight=0.01, normalize_reward=True),
        optimizer=OptimizerConfig(learning_rate=2e-3, clip_norm=0.5),
    )
