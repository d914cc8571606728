"""DQN and Ape-X DQN."""

from __future__ import annotations

from typing import Annotated, Literal

from echelon.algorithm_config import AlgorithmConfig, NormalizeReplayedReward, RewardClip
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


class DqnConfig(AlgorithmConfig, frozen=True):
    """DQN with double Q-learning (van Hasselt et al., 2016) and a dueling network (Wang et al., 2016)."""

    builder = "echelon.algorithms.dqn:Dqn"
    network = "echelon.algorithms.value_networks:action_values"
    distribution = "greedy"
    exploration = "echelon.algorithms.exploration:EpsilonGreedy"
    experience = "replay"

    name: Annotated[Literal["dqn"], doc("the algorithm")] = "dqn"
    double: Annotated[
        bool, doc("double Q-learning: the online network selects the action, the target network evaluates it")
    ] = True
    dueling: Annotated[bool, doc("dueling network: separate value and advantage streams")] = True
    huber: Annotated[float, doc("delta of the Huber loss: larger TD errors count linearly; 0: squared error", ge=0)] = (
        1.0
    )
    target_period: Annotated[
        int, doc("updates between copies to the target network; 0: soft updates by target_tau", "updates", ge=0)
    ] = 500
    target_tau: Annotated[
        float, doc("rate of the soft update of the target network; 0: copies every target_period", ge=0, le=1)
    ] = 0.0
    epsilon_start: Annotated[float, doc("probability of a random action at the first step", ge=0, le=1)] = 1.0
    epsilon_end: Annotated[float, doc("probability of a random action after epsilon_steps", ge=0, le=1)] = 0.05
    epsilon_steps: Annotated[int, doc("steps over which epsilon decays linearly", "steps", ge=0)] = 10_000
    epsilon_decay: Annotated[
        float, doc("factor by which epsilon decays at every step of the run instead; 0: linearly", ge=0, lt=1)
    ] = 0.0
    epsilon_ladder: Annotated[bool, doc("epsilon of environment i of N ends at 0.4^(1 + 7i/(N-1)) instead (Ape-X)")] = (
        False
    )
    reward_clip: RewardClip = 0.0
    normalize_reward: NormalizeReplayedReward = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            (self.target_period > 0) != (self.target_tau > 0),
            f"algorithm.target_period={self.target_period} and algorithm.target_tau={self.target_tau}: the target "
            "network is either copied every target_period updates or updated softly by target_tau. Set one of them to "
            "0 and the other above 0.",
        )
        require(
            not (self.epsilon_decay and self.epsilon_ladder),
            f"algorithm.epsilon_decay={self.epsilon_decay} and algorithm.epsilon_ladder=true: a ladder is reached "
            "linearly, over epsilon_steps. Set epsilon_decay to 0 or epsilon_ladder to false.",
        )

    def epsilon(self, env_steps: int) -> float | None:
        if self.epsilon_ladder:
            return None
        if self.epsilon_decay:
            return max(self.epsilon_start * self.epsilon_decay**env_steps, self.epsilon_end)
        fallen = min(env_steps / self.epsilon_steps, 1.0) if self.epsilon_steps else 1.0
        return self.epsilon_start + fallen * (self.epsilon_end - self.epsilon_start)


@register(DqnConfig)
def dqn(env: EnvId = "CartPole-v1", family: str = "") -> TrainConfig:
    """Double DQN with a dueling network, one actor, uniform replay."""
    return TrainConfig(
        preset="dqn",
        env=EnvConfig(id=env),
        actor=ActorConfig(num_actors=1, envs=8, trajectory=1),
        network=NetworkConfig(hidden=(128, 128), normalize_observation=True),
        # Squared error: with returns far above 1 the Huber loss fits a median, which ignores the rare episode ends.
        algorithm=DqnConfig(huber=0.0, target_period=100, epsilon_end=0.04, epsilon_steps=8_000, normalize_reward=True),
        replay=ReplayConfig(capacity=50_000, batch=128, n_step=3, samples_per_insert=32.0),
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="linear", clip_norm=10.0),
    )


@register(DqnConfig)
def apex_dqn(env: EnvId = "CartPole-v1", family: str = "") -> TrainConfig:
    """The same algorithm with many actors: each has its own final epsilon and computes its own initial priorities."""
    return replace(
        dqn(env, family),
        **{
            "preset": "apex-dqn",
            "actor.num_actors": 2,
            "algorithm.epsilon_ladder": True,
            "algorithm.normalize_reward": False,
            "replay.prioritized": True,
            "replay.n_step": 3,
        },
    )
