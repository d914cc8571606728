"""Presets: every preset is complete and consistent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import echelon
from echelon import config_io
from echelon.config import AlgorithmConfig, ImpalaConfig, PpoConfig, TrainConfig, replace
from echelon.errors import ConfigError
from echelon.names import resolve
from echelon.presets import DEFAULT_ENVS, PRESETS, preset
from echelon.roles.plan.layouts import window

ENVS = ["CartPole-v1", "ALE/Pong-v5", "SuperMarioBros-1-1", "Pendulum-v1", "module:factory"]
OTHER_PONGS = ["ale_py:ALE/Pong-v5", "PongNoFrameskip-v4", "PongDeterministic-v0", "Pong-v4", "envpool:Pong-v5"]
NEW_RULE = """
from typing import Annotated, Literal

from echelon.config import TrainConfig, replace
from echelon.fields import doc
from echelon.presets.dqn import DqnConfig, dqn
from echelon.presets.registry import register


class NewConfig(DqnConfig, frozen=True):
    builder = "new:Rule"
    name: Annotated[Literal["new"], doc("the algorithm")] = "new"
    quantiles: Annotated[int, doc("quantiles of the return", ge=1)] = 51


@register(NewConfig)
def new_rule(env: str) -> TrainConfig:
    return replace(dqn(env), preset="new-rule", algorithm=NewConfig())
"""
USE_NEW_RULE = """
import sys
from echelon import config_io
from echelon.cli.main import main
from echelon.config import NewConfig
from echelon.presets import PRESETS, REPLAY_PRESETS, new_rule, preset

config = preset("new-rule", "CartPole-v1")
assert PRESETS["new-rule"] is REPLAY_PRESETS["new-rule"] is new_rule and config.preset == "new-rule"
assert new_rule("CartPole-v1") == config
assert isinstance(config.algorithm, NewConfig) and config.algorithm.distribution == "greedy"
assert config_io.from_json(config_io.to_json(config)) == config
try:
    main(["train", "new-rule", "--help"])
except SystemExit:
    assert "torch" not in sys.modules
"""


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
    for name in PRESETS.keys() - DEFAULT_ENVS.keys():
        assert preset(name, "ALE/Pong-v5").algorithm.reward_clip == 1.0
        assert preset(name, "CartPole-v1").algorithm.reward_clip == 0.0
    assert isinstance(preset("impala", "CartPole-v1").algorithm, ImpalaConfig)


@pytest.mark.parametrize("num_actors", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", ["ppo", "async-ppo"])
def test_ppo_learns_super_mario_bros_from_equal_batches_of_any_number_of_actors(name: str, num_actors: int) -> None:
    config = replace(preset(name, "SuperMarioBros-1-1"), **{"actor.num_actors": num_actors})
    assert config.batch_trajectories * config.actor.envs * config.actor.trajectory == 2_048
    assert window(config) * num_actors == 16 * (1 + (name == "async-ppo"))
    assert config.env.kwargs["actions"] == "two" and preset(name, "CartPole-v1").env.kwargs == {}


def test_an_unknown_preset_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no preset 'asinc-ppo'\. Presets: impala, ppo, .*Did you mean async-ppo\?"):
        preset("asinc-ppo", "CartPole-v1")


def test_a_file_is_all_that_a_new_preset_takes(tmp_path: Path) -> None:
    shutil.copytree(Path(echelon.__file__).parent, tmp_path / "echelon")
    (tmp_path / "echelon" / "presets" / "new_rule.py").write_text(NEW_RULE)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", USE_NEW_RULE], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert "--algorithm.quantiles int  (default 51) quantiles of the return [at least 1]" in ended.stdout


def test_two_rules_of_one_name_are_refused() -> None:
    program = (
        "from echelon.algorithm_config import AlgorithmConfig\n"
        "from echelon.presets.dqn import DqnConfig\n"
        "class Nameless(DqnConfig, frozen=True): ...\n"
        "AlgorithmConfig.classes()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "DqnConfig and __main__:Nameless both define the algorithm 'dqn'" in ended.stderr


@pytest.mark.parametrize("name", AlgorithmConfig.classes())
def test_the_parts_that_a_rule_names_are_there(name: str) -> None:
    rule = AlgorithmConfig.classes()[name]
    assert rule().name == name
    for part in filter(None, (rule.builder, rule.network, rule.exploration)):
        assert callable(resolve(part)), part


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


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("env", OTHER_PONGS)
def test_an_atari_game_has_the_same_values_however_it_is_spelled(name: str, env: str) -> None:
    usual = preset(name, "ALE/Pong-v5")
    assert preset(name, env) == replace(usual, env=replace(usual.env, id=env))


@pytest.mark.parametrize("env", ["Blackjack-v1", "envpool:Ant-v5", "envpool:Blackjack-v1", "Pong-v4.py:make", "x:Pong"])
def test_other_environments_are_not_taken_for_atari(env: str) -> None:
    usual = preset("ppo", "CartPole-v1")
    assert preset("ppo", env) == replace(usual, env=replace(usual.env, id=env))
