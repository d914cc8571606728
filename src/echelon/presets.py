"""Presets: a name for a choice of values on the one data path, with values that suit the environment's family."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace

from echelon.config import (
    ActorConfig,
    EnvConfig,
    ImpalaConfig,
    LearnerConfig,
    NetworkConfig,
    OptimizerConfig,
    PpoConfig,
    TrainConfig,
)
from echelon.errors import ConfigError


def is_atari(env: str) -> bool:
    return env.startswith("ALE/")


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


def ppo(env: str = "CartPole-v1") -> TrainConfig:
    """Clipped PPO, synchronous: actors wait while the learner learns."""
    if is_atari(env):
        return TrainConfig(
            preset="ppo",
            env=EnvConfig(id=env),
            actor=ActorConfig(envs=8, trajectory=128),
            learner=LearnerConfig(max_lag=0),
            algorithm=PpoConfig(clip=0.1, entropy_weight=0.01, reward_clip=1.0),
            optimizer=OptimizerConfig(learning_rate=2.5e-4),
        )
    return TrainConfig(
        preset="ppo",
        env=EnvConfig(id=env),
        actor=ActorConfig(envs=8, trajectory=128),
        learner=LearnerConfig(max_lag=0),
        network=NetworkConfig(),
        algorithm=PpoConfig(epochs=10, minibatches=8),
        optimizer=OptimizerConfig(learning_rate=5e-4),
    )


def async_ppo(env: str = "CartPole-v1") -> TrainConfig:
    """The same rule while actors run ahead by at most one version, corrected for that lag."""
    config = ppo(env)
    assert isinstance(config.algorithm, PpoConfig)
    return replace(
        config,
        preset="async-ppo",
        learner=replace(config.learner, max_lag=1),
        algorithm=replace(config.algorithm, correct_lag=True),
    )


PRESETS: dict[str, Callable[[str], TrainConfig]] = {"impala": impala, "ppo": ppo, "async-ppo": async_ppo}


def preset(name: str, env: str) -> TrainConfig:
    """The configuration that `name` stands for on `env`."""
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}.{hint}")
    return PRESETS[name](env)
