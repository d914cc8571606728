"""SAC."""

from __future__ import annotations

from typing import Annotated, Literal

from echelon.algorithm_config import AlgorithmConfig
from echelon.config import (
    ActorConfig,
    EnvConfig,
    NetworkConfig,
    OptimizerConfig,
    ReplayConfig,
    TrainConfig,
)
from echelon.fields import doc
from echelon.presets.registry import is_atari, register


class SacConfig(AlgorithmConfig, frozen=True):
    """Soft actor-critic with a learned temperature (Haarnoja et al., 2018), for continuous and discrete actions."""

    builder = "echelon.algorithms.sac:Sac"
    network = "echelon.algorithms.value_networks:head"
    distribution = "squashed"
    exploration = "echelon.algorithms.exploration:RandomStart"
    experience = "replay"

    name: Annotated[Literal["sac"], doc("the learning rule")] = "sac"
    num_critics: Annotated[int, doc("critics, of which the lowest counts", ge=1)] = 2
    target_tau: Annotated[float, doc("part of the way that target networks go at every update", gt=0, le=1)] = 0.005
    critic_learning_rate: Annotated[float, doc("step size of the critics; optimizer's is the policy's", gt=0)] = 1e-3
    temperature: Annotated[float, doc("what entropy is worth; the first value where it is learned", gt=0)] = 1.0
    learn_temperature: Annotated[bool, doc("adapt the temperature to target_entropy")] = True
    temperature_learning_rate: Annotated[float, doc("step size of the temperature", gt=0)] = 1e-3
    target_entropy: Annotated[
        float | None, doc("none: -(action components), or 0.98 of a uniform choice's if discrete")
    ] = None
    random_steps: Annotated[int, doc("steps with random actions, before the policy acts", "steps", ge=0)] = 1_000
    reward_clip: Annotated[float, doc("largest size of a single reward; 0: any, 1: as usual on Atari", ge=0)] = 0.0


@register(SacConfig)
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
