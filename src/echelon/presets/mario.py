"""Double DQN on Super Mario Bros, with actors that act through a central server: the PyTorch tutorial's agent."""

from __future__ import annotations

from echelon.config import (
    ActingConfig,
    ActorConfig,
    EnvConfig,
    EnvId,
    EvaluationConfig,
    NetworkConfig,
    OptimizerConfig,
    ReplayConfig,
    RunConfig,
    StopConfig,
    TrainConfig,
)
from echelon.families import family_of
from echelon.presets.dqn import DqnConfig
from echelon.presets.registry import register

LEARN_EVERY = 3  # steps per update
TARGET_STEPS = 10_000  # between copies to the target network


@register(DqnConfig, env="SuperMarioBros-1-1")
def mario(env: EnvId = "SuperMarioBros-1-1", family: str = "") -> TrainConfig:
    """Double DQN on Super Mario Bros with four actors; slow and simple, to compare with."""
    is_mario = family_of(env) == "mario"
    return TrainConfig(
        preset="mario",
        env=EnvConfig(id=env, kwargs={"actions": "two"} if is_mario else {}),
        actor=ActorConfig(num_actors=4, envs=1, trajectory=1),
        acting=ActingConfig(mode="central"),
        network=NetworkConfig(hidden=(512,), activation="relu"),
        algorithm=DqnConfig(
            discount=0.9,
            dueling=False,
            target_period=TARGET_STEPS // LEARN_EVERY,
            epsilon_decay=0.99999975,
            epsilon_end=0.1,
        ),
        replay=ReplayConfig(
            capacity=100_000,
            min_size=10_000,
            batch=32,
            samples_per_insert=32 / LEARN_EVERY,
            exact=True,
            checkpoint=True,
        ),
        optimizer=OptimizerConfig(learning_rate=2.5e-4, epsilon=1e-8, clip_norm=0.0),
        evaluation=EvaluationConfig(interval_s=0.0, episodes=1 if is_mario else 10),  # all would be the same: no no-ops
        run=RunConfig(checkpoint_interval_s=120.0, log_interval=10),
        stop=StopConfig(episodes=50_000),
    )
