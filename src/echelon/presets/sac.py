"""SAC."""

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
)
from echelon.fields import doc
from echelon.presets.registry import register


class SacConfig(AlgorithmConfig, frozen=True):
    """Soft actor-critic with a learned temperature (Haarnoja et al., 2018), for continuous and discrete actions."""

    builder = "echelon.algorithms.sac:Sac"
    network = "echelon.algorithms.value_networks:head"
    distribution = "squashed"
    exploration = "echelon.algorithms.exploration:RandomStart"
    experience = "replay"

    name: Annotated[Literal["sac"], doc("the algorithm")] = "sac"
    num_critics: Annotated[int, doc("number of critics; targets use the minimum", ge=1)] = 2
    target_tau: Annotated[float, doc("rate of the soft update of target networks", gt=0, le=1)] = 0.005
    critic_learning_rate: Annotated[
        float, doc("learning rate of the critics; optimizer.learning_rate is the policy's", gt=0)
    ] = 1e-3
    temperature: Annotated[
        float, doc("temperature, the weight of the entropy; the initial value if it is learned", gt=0)
    ] = 1.0
    learn_temperature: Annotated[bool, doc("adapt the temperature to target_entropy")] = True
    temperature_learning_rate: Annotated[float, doc("learning rate of the temperature", gt=0)] = 1e-3
    target_entropy: Annotated[
        float | None,
        doc("entropy that the temperature aims for; none: -(action components), discrete: by target_entropy_fraction"),
    ] = None
    target_entropy_fraction: Annotated[
        float,
        doc("discrete actions: target_entropy as a fraction of log(actions), of those allowed in a state", ge=0, le=1),
    ] = 0.7
    random_steps: Annotated[int, doc("steps with random actions at the start", "steps", ge=0)] = 1_000
    noise_correlation: NoiseCorrelation = 0.0
    reward_clip: RewardClip = 0.0
    normalize_reward: NormalizeReplayedReward = False


@register(SacConfig)
def sac(env: EnvId = "Pendulum-v1", family: str = "") -> TrainConfig:
    """Soft actor-critic with a learned temperature, one actor, uniform replay."""
    return TrainConfig(
        preset="sac",
        env=EnvConfig(id=env),
        actor=ActorConfig(num_actors=1, envs=1, trajectory=1),
        network=NetworkConfig(hidden=(256, 256), activation="relu", normalize_observation=True),
        algorithm=SacConfig(normalize_reward=True),
        replay=ReplayConfig(),
        optimizer=OptimizerConfig(learning_rate=3e-4, clip_norm=0.0),
    )
