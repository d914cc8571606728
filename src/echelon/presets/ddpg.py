"""DDPG and TD3, with one actor or with many (Ape-X).

`ddpg` has the values of the paper for observations that are vectors. Differences from the paper: the critic's first
layer, not its second, takes the action; the weight decay includes biases; there is no batch normalisation; the output
layers begin with orthogonal weights of gain 0.01, not with uniform ones up to 0.003.
"""

from __future__ import annotations

from typing import Annotated, Literal

from echelon.algorithm_config import AlgorithmConfig, NoiseCorrelation, NormalizeReplayedReward, RewardClip
from echelon.config import (
    ActorConfig,
    EnvConfig,
    EnvId,
    NetworkConfig,
    OptimizerConfig,
    ReplayConfig,
    TrainConfig,
    replace,
)
from echelon.fields import doc, require
from echelon.presets.registry import register


class DdpgConfig(AlgorithmConfig, frozen=True):
    """Deterministic policy gradients (Lillicrap et al., 2016); TD3 (Fujimoto et al., 2018) by its fields."""

    builder = "echelon.algorithms.ddpg:Ddpg"
    network = "echelon.algorithms.value_networks:head_and_critic"
    distribution = "deterministic"
    exploration = "echelon.algorithms.exploration:ActionNoise"
    experience = "replay"

    name: Annotated[Literal["ddpg"], doc("the algorithm")] = "ddpg"
    num_critics: Annotated[int, doc("number of critics; targets use the minimum; TD3: 2", ge=1)] = 1
    policy_delay: Annotated[int, doc("critic updates per policy update; TD3: 2", "updates", ge=1)] = 1
    target_noise: Annotated[float, doc("standard deviation of the noise on target actions; TD3: 0.2", ge=0)] = 0.0
    target_noise_clip: Annotated[float, doc("bound on the noise on target actions", ge=0)] = 0.5
    target_tau: Annotated[float, doc("rate of the soft update of target networks", gt=0, le=1)] = 0.005
    critic_learning_rate: Annotated[
        float, doc("learning rate of the critics; optimizer.learning_rate is the policy's", gt=0)
    ] = 1e-3
    critic_weight_decay: Annotated[float, doc("L2 penalty on the parameters of the critics; DDPG: 0.01", ge=0)] = 0.0
    huber: Annotated[float, doc("delta of the Huber loss: larger TD errors count linearly; 0: squared error", ge=0)] = (
        0.0
    )
    noise: Annotated[float, doc("standard deviation of the exploration noise", "half the action range", ge=0)] = 0.1
    noise_correlation: NoiseCorrelation = 0.0
    noise_ladder: Annotated[
        float,
        doc(
            "noise of the last environment; the noise decreases from the first to the last; 0: equal for all",
            "half the action range",
            ge=0,
        ),
    ] = 0.0
    random_steps: Annotated[int, doc("steps with random actions at the start", "steps", ge=0)] = 1_000
    publish_critic: Annotated[
        bool, doc("publish the critic to the actors, which compute initial priorities with it")
    ] = False
    reward_clip: RewardClip = 0.0
    normalize_reward: NormalizeReplayedReward = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.noise_ladder <= self.noise,
            f"algorithm.noise_ladder={self.noise_ladder} exceeds algorithm.noise={self.noise}, where the "
            "ladder starts. Lower noise_ladder or raise noise.",
        )


@register(DdpgConfig)
def ddpg(env: EnvId = "Pendulum-v1", family: str = "") -> TrainConfig:
    """DDPG as in its paper: one critic, slow targets, Ornstein-Uhlenbeck noise; one actor, uniform replay."""
    return TrainConfig(
        preset="ddpg",
        env=EnvConfig(id=env),
        actor=ActorConfig(num_actors=1, envs=1, trajectory=1),
        network=NetworkConfig(hidden=(400, 300), activation="relu"),
        algorithm=DdpgConfig(
            target_tau=0.001,
            critic_learning_rate=1e-3,
            critic_weight_decay=1e-2,
            noise=0.38,  # stationary deviation of an Ornstein-Uhlenbeck process: sigma / sqrt(1 - (1 - theta)^2)
            noise_correlation=0.85,  # theta = 0.15, sigma = 0.2
            random_steps=0,
        ),
        replay=ReplayConfig(batch=64, samples_per_insert=64.0),
        optimizer=OptimizerConfig(learning_rate=1e-4, clip_norm=0.0),
    )


@register(DdpgConfig)
def td3(env: EnvId = "Pendulum-v1", family: str = "") -> TrainConfig:
    """DDPG with twin critics, delayed policy updates and target smoothing (TD3), one actor, uniform replay."""
    return TrainConfig(
        preset="td3",
        env=EnvConfig(id=env),
        actor=ActorConfig(num_actors=1, envs=1, trajectory=1),
        network=NetworkConfig(hidden=(256, 256), activation="relu", normalize_observation=True),
        algorithm=DdpgConfig(num_critics=2, policy_delay=2, target_noise=0.2, normalize_reward=True),
        replay=ReplayConfig(batch=128, samples_per_insert=128.0),
        optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=0.0),
    )


@register(DdpgConfig)
def apex_ddpg(env: EnvId = "Pendulum-v1", family: str = "") -> TrainConfig:
    """TD3 with many actors of different noise, which compute initial priorities with the critic."""
    config = td3(env, family)
    return replace(
        config,
        **{
            "preset": "apex-ddpg",
            "actor.num_actors": 2,
            "actor.envs": 4,
            "algorithm.normalize_reward": False,
            "algorithm.noise": 0.4,
            "algorithm.noise_ladder": 0.05,
            "algorithm.publish_critic": True,
            "replay.prioritized": True,
            "replay.n_step": 3,
            "replay.samples_per_insert": 64.0,
            "replay.beta_end": config.replay.beta_start,
        },
    )
