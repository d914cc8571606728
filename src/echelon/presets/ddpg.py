"""DDPG and TD3, with one actor and with many (Ape-X)."""

from __future__ import annotations

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
    replace,
)
from echelon.presets.registry import is_atari, register


@dataclass(frozen=True)
class DdpgConfig(AlgorithmConfig):
    """Deterministic policy gradients (Lillicrap et al., 2016); TD3 (Fujimoto et al., 2018) by its values."""

    builder = "echelon.algorithms.ddpg:Ddpg"
    network = "echelon.algorithms.value_networks:head_and_critic"
    distribution = "deterministic"
    exploration = "echelon.algorithms.exploration:ActionNoise"
    experience = "replay"

    name: Literal["ddpg"] = "ddpg"
    num_critics: int = 1  # TD3: 2, of which the lower counts
    policy_delay: int = 1  # critic updates per policy update; TD3: 2
    target_noise: float = 0.0  # on the actions that targets are computed from; TD3: 0.2
    target_noise_clip: float = 0.5
    target_tau: float = 0.005
    critic_learning_rate: float = 1e-3  # the policy's is optimizer.learning_rate
    huber: float = 0.0  # TD errors beyond it count linearly; 0: all are squared
    noise: float = 0.1  # deviation of the noise that actors add, in units of half the action range
    noise_ladder: float = 0.0  # else than 0: the noise falls to this from the first environment to the last
    random_steps: int = 1_000  # environment steps with actions drawn at random, before the policy acts
    publish_critic: bool = False  # actors get the critic too, for the priorities of what they store

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "algorithm", num_critics=1, policy_delay=1, target_noise=0, target_noise_clip=0, huber=0)
        at_least(self, "algorithm", noise=0, noise_ladder=0, random_steps=0)
        above_zero(self, "algorithm", "critic_learning_rate")
        parts(self, "algorithm", "target_tau")
        require(
            self.noise_ladder <= self.noise,
            f"algorithm.noise_ladder={self.noise_ladder} exceeds algorithm.noise={self.noise}, from which it falls.",
        )


@register
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


@register
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
