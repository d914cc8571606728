"""IMPALA: V-trace corrects for the lag of actors."""

from __future__ import annotations

from typing import Annotated, Literal

from echelon.algorithm_config import (
    AlgorithmConfig,
    EntropyWeight,
    NoiseCorrelation,
    NormalizeAdvantage,
    NormalizeReward,
    RewardClip,
    ValueWeight,
)
from echelon.config import (
    ActorConfig,
    EnvConfig,
    EnvId,
    NetworkConfig,
    OptimizerConfig,
    TrainConfig,
)
from echelon.fields import doc
from echelon.presets.registry import register


class ImpalaConfig(AlgorithmConfig, frozen=True):
    """V-trace actor-critic (Espeholt et al., 2018)."""

    builder = "echelon.algorithms.impala:Impala"

    name: Annotated[Literal["impala"], doc("the algorithm")] = "impala"
    rho_clip: Annotated[float, doc("bound rho-bar on the importance weights of temporal differences", ge=0)] = 1.0
    c_clip: Annotated[float, doc("bound c-bar on the importance weights of the traces", ge=0)] = 1.0
    trace_lambda: Annotated[float, doc("lambda, the decay of the traces", ge=0, le=1)] = 1.0
    epochs: Annotated[
        int, doc("passes over each batch; V-trace corrects for the policy change between passes", ge=1)
    ] = 1
    minibatches: Annotated[int, doc("minibatches per pass, split by environment", ge=1)] = 1
    value_weight: ValueWeight = 0.5
    entropy_weight: EntropyWeight = 0.01
    normalize_advantage: NormalizeAdvantage = False
    reward_clip: RewardClip = 0.0
    normalize_reward: NormalizeReward = False
    noise_correlation: NoiseCorrelation = 0.0

    @property
    def whole_minibatches(self) -> str:
        if self.normalize_advantage:
            return "it normalizes the advantages of a whole minibatch. Use --algorithm.normalize-advantage false"
        return super().whole_minibatches


@register(ImpalaConfig)
def impala(env: EnvId = "CartPole-v1", family: str = "") -> TrainConfig:
    """V-trace actor-critic: actors do not wait for the learner, and V-trace corrects for their lag."""
    return TrainConfig(
        preset="impala",
        env=EnvConfig(id=env),
        actor=ActorConfig(total_envs=32, trajectory=20, slots=2),
        network=NetworkConfig(normalize_observation=True),
        algorithm=ImpalaConfig(entropy_weight=0.01, normalize_reward=True),
        optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=0.5),
    )
