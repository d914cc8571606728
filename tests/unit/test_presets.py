"""Presets: a name for a choice of values, whole and consistent."""

from __future__ import annotations

import json

import pytest

from echelon import config_io
from echelon.config import ImpalaConfig, PpoConfig, TrainConfig, replace
from echelon.errors import ConfigError
from echelon.presets import PRESETS, preset
from echelon.roles.plan import window

ENVS = ["CartPole-v1", "ALE/Pong-v5", "Pendulum-v1", "module:factory"]


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_itself_and_its_environment_and_travels_as_json(name: str, env: str) -> None:
    config = preset(name, env)
    assert config.preset == name and config.env.id == env
    assert config_io.from_json(json.loads(json.dumps(config_io.to_json(config)))) == config
    assert window(config) >= 1


@pytest.mark.parametrize("env", ENVS)
def test_synchronous_training_is_asynchronous_training_without_lag(env: str) -> None:
    sync, lagging = preset("ppo", env), preset("async-ppo", env)
    assert isinstance(sync.algorithm, PpoConfig) and isinstance(lagging.algorithm, PpoConfig)
    assert sync.learner.max_lag == 0 and not sync.algorithm.correct_lag
    assert lagging.learner.max_lag == 1 and lagging.algorithm.correct_lag
    same = {"preset": "ppo", "learner.max_lag": 0, "algorithm.correct_lag": False}
    assert replace(lagging, **same) == sync
    assert preset("impala", env).learner.max_lag is None


def test_atari_gets_clipped_rewards_and_everything_else_its_own() -> None:
    for name in PRESETS:
        assert preset(name, "ALE/Pong-v5").algorithm.reward_clip == 1.0
        assert preset(name, "CartPole-v1").algorithm.reward_clip == 0.0
    assert isinstance(preset("impala", "CartPole-v1").algorithm, ImpalaConfig)


def test_an_unknown_preset_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no preset 'asinc-ppo'; there are impala, ppo, .*Did you mean async-ppo\?"):
        preset("asinc-ppo", "CartPole-v1")


@pytest.mark.parametrize(("num_actors", "batch", "max_lag", "slots", "expected"), [
    (2, 0, 0, 4, 1),
    (2, 4, 0, 4, 2),
    (2, 4, 1, 4, 4),
    (4, 0, 3, 4, 4),
    (2, 0, None, 3, 3),
    (2, 9, None, 2, 6),
])  # fmt: skip
def test_how_far_ahead_an_actor_may_run(
    num_actors: int, batch: int, max_lag: int | None, slots: int, expected: int
) -> None:
    fields = {"actor.num_actors": num_actors, "actor.slots": slots, "learner.batch": batch, "learner.max_lag": max_lag}
    assert window(replace(TrainConfig(), **fields)) == expected


def test_a_bounded_lag_needs_equal_shares() -> None:
    config = replace(TrainConfig(), **{"actor.num_actors": 2, "learner.batch": 3, "learner.max_lag": 1})
    with pytest.raises(ConfigError, match=r"learner\.batch=3 is not a multiple of the 2 actors"):
        window(config)
