"""SAC."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from echelon.algorithm_config import AlgorithmConfig
from echelon.bounds import above_zero, at_least, parts, require
from echelon.config import (
    ActorConfig,
    EnvConfig,
    NetworkConfig,
    OptimizerConfig,
    ReplayConfig,
    TrainConfig,
)
from echelon.presets.registry import is_atari, register


@dataclass(frozen=True)
class SacConfig(AlgorithmConfig):
    """Soft actor-critic with a learned temperature (Haarnoja et al., 2018), for continuous and discrete actions."""

    builder = "echelon.algorithms.sac:Sac"
    network = "echelon.algorithms.value_networks:head"
    distribution = "squashed"
    exploration = "echelon.algorithms.exploration:RandomStart"
    experience = "replay"

    name: Literal["sac"] = "sac"
    num_critics: int = 2
    target_tau: float = 0.005
    critic_learning_rate: float = 1e-3  # the policy's is optimizer.learning_rate
    temperature: float = 1.0  # what entropy is worth; the first value where it is learned
    learn_temperature: bool = True
    temperature_learning_rate: float = 1e-3
    target_entropy: float | None = None  # none: -(action components), or 0.98 of a uniform choice's if discrete
    random_steps: int = 1_000  # environment steps with actions drawn at random, before the policy acts

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "algorithm", num_critics=1, random_steps=0)
        above_zero(self, "algorithm", "temperature", "critic_learning_rate", "temperature_learning_rate")
        parts(self, "algorithm", "target_tau")
        require(
            self.target_entropy is None or math.isfinite(self.target_entropy),
            f"algorithm.target_entropy={self.target_entropy} must be a finite number, or none for the usual one.",
        )


@register
def sac(env: str = "Pendulum-v1") -> TrainConfig:
    """Soft actor-critic with a learned temperature, one actor, uniform replay."""
    return TrainConfig(
        preset="sac",
        env=EnvConfig(id=env),
        actor=ActorConfig(num_actors=1, envs=1, trajectory=1),
        network=NetworkConfig(hidden=(256, 256), activation="relu"),
        algorithm=SacConfig(reward_clip=1.0 if is_atari(env) else 0.0),
        replay=ReplayConfig(),
        optimizer=OptimizerConfig(learning_rate=3e-4, clip_norm=0.0),
    )
