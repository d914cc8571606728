"""Presets: a name for a choice of values on the one data path, with values that suit the environment's family."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace

from echelon.config import (
    A3cConfig,
    ActorConfig,
    DdpgConfig,
    DqnConfig,
    EnvConfig,
    ImpalaConfig,
    LearnerConfig,
    NetworkConfig,
    OptimizerConfig,
    PpoConfig,
    ReplayConfig,
    SacConfig,
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


def a3c(env: str = "CartPole-v1") -> TrainConfig:
    """Advantage actor-critic: actors learn from their own rollouts and bring gradients, each a step of the weights."""
    if is_atari(env):
        return TrainConfig(
            preset="a3c",
            env=EnvConfig(id=env),
            actor=ActorConfig(envs=16, trajectory=20, slots=1),
            learner=LearnerConfig(batch=1),
            algorithm=A3cConfig(reward_clip=1.0),
            optimizer=OptimizerConfig(learning_rate=3e-4),
        )
    return TrainConfig(
        preset="a3c",
        env=EnvConfig(id=env),
        actor=ActorConfig(envs=16, trajectory=20, slots=1),
        learner=LearnerConfig(batch=1),
        algorithm=A3cConfig(gae_lambda=0.95, normalize_reward=True),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )


def dqn(env: str = "CartPole-v1") -> TrainConfig:
    """Double DQN with dueling streams, one actor, uniform replay."""
    if is_atari(env):
        return TrainConfig(
            preset="dqn",
            env=EnvConfig(id=env),
            actor=ActorConfig(num_actors=1, envs=8, trajectory=4),
            network=NetworkConfig(hidden=(256,), activation="relu"),
            algorithm=DqnConfig(target_period=2_000, epsilon_end=0.01, epsilon_steps=250_000, reward_clip=1.0),
            replay=ReplayConfig(min_size=20_000, batch=32, samples_per_insert=8.0, publish_every=16),
            optimizer=OptimizerConfig(learning_rate=1e-4, epsilon=1.5e-4, clip_norm=10.0),
        )
    return TrainConfig(
        preset="dqn",
        env=EnvConfig(id=env),
        actor=ActorConfig(num_actors=1, envs=8, trajectory=1),
        network=NetworkConfig(hidden=(128, 128), normalize_observation=True),
        # Squared errors: returns far above 1 would make Huber's loss a median, deaf to the rare end of an episode.
        algorithm=DqnConfig(huber=0.0, target_period=100, epsilon_end=0.04, epsilon_steps=8_000),
        replay=ReplayConfig(capacity=50_000, batch=128, n_step=3, samples_per_insert=32.0),
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="linear", clip_norm=10.0),
    )


def apex_dqn(env: str = "CartPole-v1") -> TrainConfig:
    """The same rule with many actors: each explores as its place on the ladder says and sets its own priorities."""
    config = dqn(env)
    assert isinstance(config.algorithm, DqnConfig)
    algorithm = replace(config.algorithm, epsilon_ladder=True)
    replay = replace(config.replay, prioritized=True, n_step=3)
    optimizer = config.optimizer
    if is_atari(env):  # batches of 128 learn faster than the paper's 512: a GPU waits for their frames
        algorithm = replace(algorithm, target_period=1_000, epsilon_steps=0)
        replay = replace(replay, batch=128, beta_end=replay.beta_start)
        optimizer = replace(optimizer, learning_rate=2e-4)
    return replace(
        config,
        preset="apex-dqn",
        actor=replace(config.actor, num_actors=2),
        algorithm=algorithm,
        replay=replay,
        optimizer=optimizer,
    )


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


def apex_ddpg(env: str = "Pendulum-v1") -> TrainConfig:
    """The same rule with many actors, from much noise to little, that judge their transitions with the critic."""
    config = ddpg(env)
    assert isinstance(config.algorithm, DdpgConfig)
    return replace(
        config,
        preset="apex-ddpg",
        actor=ActorConfig(num_actors=2, envs=4, trajectory=1),
        algorithm=replace(config.algorithm, noise=0.4, noise_ladder=0.05, publish_critic=True),
        replay=replace(
            config.replay, prioritized=True, n_step=3, samples_per_insert=64.0, beta_end=config.replay.beta_start
        ),
    )


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


REPLAY_PRESETS: dict[str, Callable[[str], TrainConfig]] = {  # those that learn from replayed transitions
    "dqn": dqn,
    "apex-dqn": apex_dqn,
    "ddpg": ddpg,
    "apex-ddpg": apex_ddpg,
    "sac": sac,
}
PRESETS: dict[str, Callable[[str], TrainConfig]] = {
    "impala": impala,
    "ppo": ppo,
    "async-ppo": async_ppo,
    "a3c": a3c,
    **REPLAY_PRESETS,
}


def preset(name: str, env: str) -> TrainConfig:
    """The configuration that `name` stands for on `env`."""
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}.{hint}")
    return PRESETS[name](env)
