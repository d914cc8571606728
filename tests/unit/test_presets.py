"""Presets: every preset is complete and consistent."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import echelon
from echelon import config_io
from echelon.cli.main import main
from echelon.config import AlgorithmConfig, ImpalaConfig, PpoConfig, TrainConfig, replace
from echelon.errors import ConfigError
from echelon.families import ATARI, FAMILIES, FAMILY_OF, family_of
from echelon.names import resolve
from echelon.presets import DEFAULT_ENVS, PRESETS, preset, zoo
from echelon.presets.ddpg import DdpgConfig
from echelon.presets.zoo import all_results, all_rows
from echelon.roles.plan.layouts import window
from echelon.roles.plan.start import preparation_text

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import zoo as zoo_benchmark

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
def new_rule(env: str, family: str = "") -> TrainConfig:
    return replace(dqn(env, family), preset="new-rule", algorithm=NewConfig())
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
    assert sync.learner.max_lag == 0 and sync.algorithm.lag_correction == "none"
    assert lagging.learner.max_lag == 1 and lagging.algorithm.lag_correction in ("vtrace", "decoupled")
    same = {"preset": "ppo", "learner.max_lag": 0, "algorithm.lag_correction": "none"}
    assert replace(lagging, **same) == sync
    assert preset("impala", env).learner.max_lag is None


def test_atari_gets_clipped_rewards_and_everything_else_its_own() -> None:
    for name in PRESETS.keys() - DEFAULT_ENVS.keys():
        assert preset(name, "ALE/Pong-v5").algorithm.reward_clip == 1.0
        assert preset(name, "CartPole-v1").algorithm.reward_clip == 0.0
    assert isinstance(preset("impala", "CartPole-v1").algorithm, ImpalaConfig)


@pytest.mark.parametrize("num_actors", [1, 2, 3, 8, 14, 16])
@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("name", ["ppo", "async-ppo", "impala"])
def test_more_actors_do_not_make_larger_batches(name: str, env: str, num_actors: int) -> None:
    config = preset(name, env)
    alone = replace(config, **{"actor.num_actors": 1})
    many = replace(config, **{"actor.num_actors": num_actors})
    size = many.batch_trajectories * many.actor.envs_per_actor
    total = alone.batch_trajectories * alone.actor.envs_per_actor
    assert 2 / 3 <= size / total <= 4 / 3 or (many.actor.exceed_envs and size == num_actors)
    assert window(many) == window(config)  # nor more lag


def test_the_environments_of_an_actor_can_be_given() -> None:
    config = replace(preset("ppo", "CartPole-v1"), **{"actor.envs": 32, "actor.num_actors": 4})
    assert config.actor.envs_per_actor == 32


def test_super_mario_bros_has_two_actions() -> None:
    assert preset("async-ppo", "SuperMarioBros-1-1").env.kwargs["actions"] == "two"
    assert preset("ppo", "CartPole-v1").env.kwargs == {}


def test_ddpg_is_the_papers_and_td3_has_two_critics() -> None:
    ddpg, td3 = preset("ddpg", "Pendulum-v1"), preset("td3", "Pendulum-v1")
    assert isinstance(ddpg.algorithm, DdpgConfig) and isinstance(td3.algorithm, DdpgConfig)
    plain = {"num_critics": 1, "policy_delay": 1, "target_noise": 0.0, "target_tau": 0.001, "critic_weight_decay": 0.01}
    assert {name: getattr(ddpg.algorithm, name) for name in plain} == plain
    theta, sigma = 1.0 - ddpg.algorithm.noise_correlation, 0.2
    assert theta == pytest.approx(0.15)
    assert ddpg.algorithm.noise == pytest.approx(sigma / math.sqrt(1.0 - (1.0 - theta) ** 2), rel=0.01)
    assert (td3.algorithm.num_critics, td3.algorithm.policy_delay, td3.algorithm.target_noise) == (2, 2, 0.2)


def test_a_run_keeps_the_values_that_its_preset_had_when_it_began(tmp_path: Path, shm_dir: Path) -> None:
    """`ddpg` was TD3 before there was a preset of that name, and some fields are newer."""
    short = {"replay.min_size": 100, "replay.batch": 16, "network.hidden": (8,), "evaluation.episodes": 0}
    places = {"run.dir": str(tmp_path / "run"), "shm_dir": str(shm_dir), "engine": "inline", "stop.steps": 200}
    config = replace(preset("td3", "Pendulum-v1"), **{"preset": "ddpg", **short, **places})
    echelon.train(config, output=io.StringIO())
    path = tmp_path / "run" / "config.json"
    stored = json.loads(path.read_text())
    for newer in ("noise_correlation", "critic_weight_decay"):
        del stored["config"]["algorithm"][newer]
    path.write_text(json.dumps(stored))
    assert echelon.resume(tmp_path / "run", steps=400, output=io.StringIO()).summary["env_steps"] >= 400
    resumed = config_io.from_json(json.loads(path.read_text())["config"])
    assert resumed.preset == "ddpg" and resumed.algorithm == config.algorithm


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


@pytest.mark.parametrize(("env", "family"), [
    ("Blackjack-v1", "toy-text"),
    ("envpool:Blackjack-v1", "toy-text"),
    ("envpool:Ant-v5", "mujoco"),
    ("Ant-v4", "mujoco"),
    ("pybullet_envs_gymnasium:HumanoidBulletEnv-v0", "mujoco"),
    ("gymnasium:CartPole-v1", "classic-control"),
    ("CarRacing-v3", "images"),
    ("SuperMarioBros-3-2", "mario"),
    ("Pong-v4.py:make", "vectors"),
    ("x:Pong", "vectors"),
    ("my_module:CartPole", "vectors"),
    ("my_module:Pong-v4", "vectors"),
    ("Tetris-v0", "vectors"),
    ("ALE/Tetris-v5", "atari"),
])  # fmt: skip
def test_families_are_recognized_by_ids_of_any_spelling(env: str, family: str) -> None:
    assert family_of(env) == family


@pytest.mark.parametrize("name", ["ppo", "async-ppo", "impala", "a3c", "dqn", "qr-dqn", "td3", "sac"])
def test_an_unknown_environment_gets_normalized_rewards_and_observations(name: str) -> None:
    config = preset(name, "my_module:make")
    assert config.algorithm.normalize_reward and config.network.normalize_observation


def test_prioritized_replay_does_not_normalize_rewards() -> None:
    assert not preset("apex-dqn", "my_module:make").algorithm.normalize_reward
    with pytest.raises(ConfigError, match="does not work with replay"):
        replace(preset("sac", "my_module:make"), **{"replay.prioritized": True})


def test_rows_of_a_family_come_before_those_of_an_environment() -> None:
    dqn, own = preset("dqn", "my_module:make", "images"), preset("dqn", "my_module:make")
    assert dqn.replay.batch == preset("dqn", "ALE/Pong-v5").replay.batch != own.replay.batch
    assert dqn.replay.capacity == 100_000 and preset("dqn", "ALE/Pong-v5").replay.capacity == 1_000_000
    with pytest.raises(ConfigError, match=r"no family 'pictures'.*images"):
        preset("dqn", "my_module:make", "pictures")


def test_a_preset_has_the_rows_of_the_one_that_it_builds_on() -> None:
    assert preset("async-ppo", "Pendulum-v1").algorithm.discount == preset("ppo", "Pendulum-v1").algorithm.discount
    assert preset("qr-dqn", "ALE/Pong-v5").replay.batch == preset("dqn", "ALE/Pong-v5").replay.batch


@pytest.mark.parametrize("index", range(len(all_rows())), ids=lambda index: all_rows()[index].preset)
def test_every_value_of_the_zoo_changes_a_preset(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(all_rows())
    row = rows[index]
    for target in row.targets:
        assert target in FAMILIES or target in FAMILY_OF or target in ATARI, target
    places = [("x:y", target) if target in FAMILIES else (f"{target}-v0", "") for target in row.targets]
    usual = [preset(name, *place) for name in PRESETS for place in places]
    for path in row.values:
        rows[index] = dataclasses.replace(
            row, values={other: row.values[other] for other in row.values if other != path}
        )
        monkeypatch.setattr(zoo, "all_rows", lambda: tuple(rows))
        assert usual != [preset(name, *place) for name in PRESETS for place in places], f"{path} has no effect"


def test_the_recorded_results_are_those_of_the_benchmark() -> None:
    tasks = {(task.preset, task.env): task for task in zoo_benchmark.TASKS}
    results = {(result.preset, result.env): result for result in all_results()}
    assert tasks.keys() <= results.keys()
    for place, result in results.items():
        assert result.preset in PRESETS and len(result.seeds) == len(result.returns) > 0
        assert place not in tasks or (
            result.seeds == (10, 11, 12, 13, 14) and result.steps <= 1.01 * tasks[place].steps
        )


def test_the_command_shows_presets_and_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{name} " in shown for name in PRESETS)
    assert main(["presets", "ppo"]) == 0
    assert "Pendulum " in capsys.readouterr().out
    assert main(["presets", "ppo", "Pendulum-v1"]) == 0
    shown = capsys.readouterr().out
    assert "* --algorithm.discount" in shown and "  --algorithm.clip " in shown and "replay" not in shown
    assert main(["presets", "dqn", "CartPole-v1"]) == 0
    assert ": 1 value differs from" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "message"), [
    (["popo"], "Did you mean ppo?"),
    (["CartPole-v1"], "PRESET comes before ENV: `echelon presets ppo CartPole-v1`"),
    (["ppo", "--family", "toy-text"], "--family toy-text has no effect without ENV"),
])  # fmt: skip
def test_words_that_show_nothing_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["presets", *words]) == 2 and message in capsys.readouterr().err


def test_a_preset_that_does_not_support_the_actions_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for name, env, fits in (("dqn", "Pendulum-v1", False), ("td3", "CartPole-v1", False), ("td3", "Pendulum-v1", True)):
        assert main(["presets", name, env]) == 0
        assert (f"{name} does not support the actions of {env}" not in capsys.readouterr().out) == fits


@pytest.mark.parametrize(("env", "remedy"), [
    ("CartPol-v1", "CartPole-v1"),
    ("CartPole-v7", "CartPole-v1"),
    ("HumanoidBulletEnv-v0", "pybullet_envs_gymnasium:"),
])  # fmt: skip
def test_values_for_a_mistyped_environment_are_refused(
    env: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["presets", "ppo", env]) == 2
    shown = capsys.readouterr()
    assert env in shown.err and remedy in shown.err and not shown.out


@pytest.mark.parametrize("words", [
    ["ALE/Pong-v5"],
    ["PongNoFrameskip-v4"],
    ["envpool:Pong-v5"],
    ["LunarLander-v3"],
    ["Humanoid-v5"],
    ["SuperMarioBros-1-1"],
    ["pybullet_envs_gymnasium:HumanoidBulletEnv-v0"],
    ["not_installed:Maze-v0"],
    ["maze.py:make"],
    ["Maze-v0", "--family", "images"],
])  # fmt: skip
def test_values_are_shown_without_the_package_of_an_environment(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("ale_py", "Box2D", "mujoco", "nes_py", "envpool", "pybullet_envs_gymnasium"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["presets", "ppo", *words]) == 0
    assert f"ppo on {words[0]}" in capsys.readouterr().out


def test_a_total_of_environments_replaces_a_number_per_actor() -> None:
    dqn = preset("dqn", "CartPole-v1")
    assert dqn.actor.envs > 0
    config = replace(dqn, **{"actor.total_envs": 4, "actor.num_actors": 2})
    assert config.actor.envs_per_actor == 2
    assert config_io.set_fields(dqn, {"actor.total_envs": "4", "actor.envs": "3"}).actor.envs_per_actor == 3
    of_a_file = {"actor.envs": 8, "actor.total_envs": 32}
    assert config_io.set_fields(dqn, {"actor.total_envs": "4"}, of_a_file).actor.envs_per_actor == 4


def test_a_start_shows_that_batches_grow_with_more_actors_than_environments() -> None:
    config = replace(preset("ppo", "CartPole-v1"), **{"actor.num_actors": 16})
    assert preparation_text(config).endswith("batches of 512 steps (with --actors 8: 256)")
    assert "batches" not in preparation_text(replace(config, **{"actor.num_actors": 8}))
