"""DDPG and TD3, with one actor and with many (Ape-X)."""

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
    replace,
)
from echelon.fields import doc, require
from echelon.presets.registry import is_atari, register


class DdpgConfig(AlgorithmConfig, frozen=True):
    """Deterministic policy gradients (Lillicrap et al., 2016); TD3 (Fujimoto et al., 2018) by its values."""

    builder = "echelon.algorithms.ddpg:Ddpg"
    network = "echelon.algorithms.value_networks:head_and_critic"
    distribution = "deterministic"
    exploration = "echelon.algorithms.exploration:ActionNoise"
    experience = "replay"

    name: Annotated[Literal["ddpg"], doc("the learning rule")] = "ddpg"
    num_critics: Annotated[int, doc("critics, of which the lowest counts; TD3: 2", ge=1)] = 1
    policy_delay: Annotated[int, doc("critic updates per policy update; TD3: 2", "updates", ge=1)] = 1
    target_noise: Annotated[float, doc("noise on the actions of targets; TD3: 0.2", ge=0)] = 0.0
    target_noise_clip: Annotated[float, doc("largest noise on the actions of targets", ge=0)] = 0.5
    target_tau: Annotated[float, doc("part of the way that target networks go at every update", gt=0, le=1)] = 0.005
    critic_learning_rate: Annotated[float, doc("step size of the critics; optimizer's is the policy's", gt=0)] = 1e-3
    huber: Annotated[float, doc("TD errors beyond it count linearly; 0: all are squared", ge=0)] = 0.0
    noise: Annotated[float, doc("deviation of the noise that actors add", "half the action range", ge=0)] = 0.1
    noise_ladder: Annotated[
        float, doc("not 0: noise falls to it from the first environment to the last", "half the action range", ge=0)
    ] = 0.0
    random_steps: Annotated[int, doc("steps with random actions, before the policy acts", "steps", ge=0)] = 1_000
    publish_critic: Annotated[bool, doc("actors get the critic too, for the priorities of what they store")] = False
    reward_clip: Annotated[float, doc("largest size of a single reward; 0: any, 1: as usual on Atari", ge=0)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.noise_ladder <= self.noise,
            f"algorithm.noise_ladder={self.noise_ladder} exceeds algorithm.noise={self.noise}, from which it falls.",
        )


@register(DdpgConfig)
def ddpg(env: str = "Pendulum-v1") -> TrainConfig:
    """Deterministic policy gradients with twin critics, delay and smoothing (TD3), one actor, uniform replay."""
    return TrainConfig(
        preset="ddpg",
        env=EnvConfig(id=env),
        actor=ActorConfig(num_actors=1, envs=1, trajectory=1),
        network=NetworkConfig(hidden=(256, 256), activation="relu"),
        algorithm=DdpgConfig(
            num_critics=2, policy_delay=2, target_noise=0.2, reward_clip=1.0 if is_atari(env) else 0.0
        ),
        replay=ReplayConfig(batch=128, samples_per_insert=128.0),
        optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=0.0),
    )


@register(DdpgConfig)
def apex_ddpg(env: str = "Pendulum-v1") -> TrainConfig:
    """The same rule with many actors, from much noise to little, that judge their transitions with the critic."""
    config = ddpg(env)
    return replace(
        config,
        **{
            "preset": "apex-ddpg",
            "actor.num_actors": 2,
            "actor.envs": 4,
            "algorithm.noise": 0.4,
            "algorithm.noise_ladder": 0.05,
            "algorithm.publish_critic": True,
            "replay.prioritized": True,
            "replay.n_step": 3,
            "replay.samples_per_insert": 64.0,
            "replay.beta_end": config.replay.beta_start,
        },
    )
