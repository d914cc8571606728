"""Super Mario Bros: rewards and ends of episodes, one game and many, saved states, and what a user can get wrong."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import echelon
from echelon.cli.main import main
from echelon.config import EnvConfig, replace
from echelon.envs.make import make_group, probe_spaces, with_rendering
from echelon.envs.mario import STAGES, Mario, MarioPool, grey
from echelon.envs.mario_game import LIVES, MODE, TIME, WORLD
from echelon.envs.nes import INSTALL
from echelon.envs.vector import StepRows
from echelon.errors import ConfigError
from echelon.evaluation import info_texts
from echelon.runs.checkpoint import FINAL

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import mario_flags

is_installed = all(map(importlib.util.find_spec, ("nes_py", "gym_super_mario_bros")))
needs_emulator = pytest.mark.skipif(not is_installed, reason=f"nes-py or gym-super-mario-bros is missing: {INSTALL}")

WAITING = {"stage": "1-1", "actions": "two", "noop_max": 3}
SEEDS = [3, 1]  # they wait for three steps and for one
SHORT = ["--engine", "inline", "--steps", "1"]

# Actions of the set "complex" that clear 1-1 by way of the fourth pipe and the room below it.
INTO_PIPE = (
    "3333333333433333333333444433344443444444333334444443222211144443"  # run, jump
    "44444433333333333333322222111aa"  # onto the pipe, down
)
OUT_OF_PIPE = "44444434444433333333311111444"  # through the room with the coins, into the pipe at its end
TO_FLAG = "444433333333434443334444333333333444443334444433322113333333334443"
TO_POLE = "34"


@pytest.fixture(scope="module")
def stage() -> Iterator[Mario]:
    """The first stage with all actions. A new game shows its title for 180 frames, so tests share this one."""
    env = Mario("1-1", "complex")
    yield env
    env.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[MarioPool]:
    pool = MarioPool(2, num_threads=2, **WAITING)
    yield pool
    pool.close()


def play(env: Mario, actions: str) -> list[tuple[float, bool, dict[str, Any]]]:
    """Plays hexadecimal digits; returns the reward, whether the episode ended, and the info of each step."""
    return [(reward, ended, info) for _, reward, ended, _, info in (env.step(int(a, 16)) for a in actions)]


def group_rows() -> StepRows:
    flags = [np.zeros(1, np.bool_) for _ in range(3)]
    return StepRows([np.zeros((1, 4, 84, 84), np.uint8)], np.zeros(1, np.float32), *flags)


@needs_emulator
def test_it_is_an_environment_with_pictures() -> None:
    env = gym.make("SuperMarioBros-1-1", render_mode="rgb_array")
    check_env(env.unwrapped)
    assert env.metadata["action_names"] == ["none", "right", "right A", "right B", "right A B", "A", "left"]
    env.reset(seed=0)
    picture: Any = env.render()
    assert picture.shape == (240, 256, 3) and picture.dtype == np.uint8
    np.testing.assert_array_equal(picture[80, 5], [104, 136, 252], "the sky is blue: channels are in order")
    env.close()
    np.testing.assert_array_equal(env.render(), picture, "the last one")
    with pytest.raises(gym.error.ClosedEnvironmentError):
        env.reset()


@needs_emulator
def test_a_group_shows_the_game_and_its_info() -> None:
    group = make_group(with_rendering(EnvConfig(id="SuperMarioBros-1-2")), [0])
    group.reset([np.zeros((1, 4, 84, 84), np.uint8)])
    assert group.render().shape == (240, 256, 3) and group.metadata["render_fps"] == 15
    assert info_texts(group.info) == {
        "stage": "1-2", "score": "0", "time": "400", "coins": "0", "life": "2", "flag": "no"
    }  # fmt: skip
    group.close()


def test_the_picture_is_the_mean_grey_of_each_area() -> None:
    screen = np.random.default_rng(0).integers(0, 256, (240, 256, 4), np.uint8)
    light = (screen[..., :3].astype(np.int64) @ [29, 150, 77] + 128) >> 8
    areas = light.repeat(7, 0).repeat(21, 1).reshape(84, 20, 84, 64)  # now every area has whole pixels
    np.testing.assert_array_equal(grey(screen), np.floor(areas.mean((1, 3)) + 0.5))


@needs_emulator
def test_the_same_actions_give_the_same_rewards_and_pictures(stage: Mario) -> None:
    """600 frames with random actions, as they are on any machine; the rewards are those of gym-super-mario-bros."""
    seen, rewards, rng = 0, [], np.random.default_rng(0)
    stage.reset(seed=0)
    for _ in range(150):
        observation, reward, ended, _, _ = stage.step(rng.integers(7))
        seen = zlib.crc32(observation, seen)
        rewards.append(reward)
        if ended:
            stage.reset()
    assert (sum(rewards), zlib.crc32(np.array(rewards, np.int8)), seen) == (652.0, 1857137144, 3251130720)


@needs_emulator
def test_a_pipe_an_area_and_the_flag(stage: Mario) -> None:
    _, info = stage.reset()
    assert info == dict(x_pos=40, time=400, score=0, coins=0, life=2, world=1, stage=1, flag_get=False)
    steps = play(stage, INTO_PIPE)
    assert steps[-3][2]["x_pos"] == 917 and steps[-1][2]["x_pos"] == 24, "in the room below"
    assert [reward for reward, _, _ in steps[-2:]] == [2.0, 0.0], "the change of the area is no move"
    steps += play(stage, OUT_OF_PIPE)
    assert steps[-1][2]["x_pos"] == 2616 and steps[-1][2]["coins"] == 7 and steps[-1][0] == 0.0
    steps += play(stage, TO_FLAG)
    assert not any(ended or info["flag_get"] for _, ended, info in steps)
    steps += play(stage, TO_POLE)
    assert [ended for _, ended, _ in steps[-2:]] == [False, True] and steps[-1][2]["flag_get"]
    assert steps[-1][2] == dict(x_pos=3161, time=362, score=1600, coins=7, life=2, world=1, stage=1, flag_get=True)
    assert sum(reward for reward, _, _ in steps) == 1558.0
    with pytest.raises(gym.error.ResetNeeded):
        stage.step(0)
    _, info = stage.reset()
    for action in (-1, 12):
        with pytest.raises(gym.error.InvalidAction, match=f"action {action} is not one of 0 to 11 .none, right, "):
            stage.step(action)
    assert stage.get_state()["buttons"] == [], "nothing was emulated"
    assert info["x_pos"] == 40 and not info["flag_get"]


@needs_emulator
def test_the_whole_game_goes_on_until_the_last_life_or_the_last_castle() -> None:
    env = Mario(None, "complex")
    env.reset()
    steps = play(env, INTO_PIPE + OUT_OF_PIPE + TO_FLAG + TO_POLE)
    assert not any(ended for _, ended, _ in steps) and sum(reward for reward, _, _ in steps) == 1558.0
    assert steps[-1][2]["flag_get"] and (steps[-1][2]["stage"], steps[-1][2]["x_pos"]) == (2, 40), "all in one step"
    steps = play(env, "1" * 25)
    lost = [info["life"] for _, _, info in steps].index(1)
    reward, ended, info = steps[lost]
    assert reward < -10.0 and not ended and (info["stage"], info["x_pos"], info["flag_get"]) == (2, 40, False)
    assert all(reward > -10.0 for reward, _, _ in steps[:lost] + steps[lost + 1 :]), "a death costs once"
    env.game.ram[LIVES] = 0
    steps = play(env, "1" * 22)
    assert [ended for _, ended, _ in steps] == [False] * 21 + [True] and steps[-1][0] < -8.0
    assert [info["life"] for _, _, info in steps] == [0] * 21 + [255], "game over"
    env.reset()
    env.game.ram[WORLD], env.game.ram[MODE] = 7, 2  # world 8, end of the world
    assert env.step(0)[2] and env.game.info()["flag_get"]
    env.close()


@needs_emulator
def test_a_castle_ends_at_the_axe() -> None:
    env = Mario("1-4")
    _, info = env.reset()
    assert (info["world"], info["stage"]) == (1, 4)
    env.game.ram[MODE] = 2
    assert env.step(0)[2] and env.game.info()["flag_get"]
    env.close()


@needs_emulator
def test_a_death_ends_a_stage(stage: Mario) -> None:
    stage.reset()
    steps = play(stage, "1" * 40)  # right, into the first goomba
    assert [ended for _, ended, _ in steps] == [False] * 39 + [True]
    reward, _, info = steps[-1]
    assert reward == -11.0 and info["x_pos"] == 296 and not info["flag_get"], "two moves of 2 and the penalty"


@needs_emulator
def test_the_end_of_the_time_is_a_death(stage: Mario) -> None:
    stage.reset()
    stage.game.ram[TIME] = bytes((0, 0, 1))
    steps = play(stage, "0" * 10)
    assert [info["time"] for _, _, info in steps] == [1] * 4 + [0] * 6
    assert steps[-1][:2] == (-15.0, True) and not any(ended for _, ended, _ in steps[:-1])


@needs_emulator
def test_many_games_are_like_single_ones(pool: MarioPool) -> None:
    """With two threads, different numbers of no-ops, and ends of episodes."""
    singles, ended, resets = [Mario(**WAITING) for _ in SEEDS], [False, False], 0
    observations, infos = pool.reset(seed=SEEDS)
    assert [len(state["buttons"]) for state in pool.get_state()] == [3, 1], "one of them has waited longer"
    for i, env in enumerate(singles):
        observation, info = env.reset(seed=SEEDS[i])
        np.testing.assert_array_equal(observations[i], observation)
        assert {name: infos[name][i] for name in info} == info and infos["_x_pos"].all()
    for _ in range(45):
        rows = pool.step(np.array([0, 0]))
        for i, env in enumerate(singles):
            if ended[i]:
                (observation, info), reward, terminal, resets = env.reset(), 0.0, False, resets + 1
            else:
                observation, reward, terminal, _, info = env.step(0)
            np.testing.assert_array_equal(rows[0][i], observation)
            assert (rows[1][i], rows[2][i], rows[3][i]) == (reward, terminal, False)
            assert {name: rows[4][name][i] for name in info} == info
            ended[i] = terminal
    assert resets == 2
    for env in singles:
        env.close()


@needs_emulator
def test_an_episode_continues_from_its_state(pool: MarioPool) -> None:
    pool.reset(seed=SEEDS)
    for _ in range(20):
        observations, *_ = pool.step([0, 1])
    states, env = json.loads(json.dumps(pool.get_state())), Mario(**WAITING)
    np.testing.assert_array_equal(env.set_state(states[0]), observations[0])
    for _ in range(25):  # to the end of the episode, and into the next one with its no-ops
        rows = pool.step([0, 1])
        observation, *_ = env.reset() if env.game.ended else env.step(0)
        np.testing.assert_array_equal(rows[0][0], observation)
    assert len(env.get_state()["buttons"]) < 25 and env.get_state() == pool.get_state()[0], "a new episode"
    np.testing.assert_array_equal(pool.set_state(states), observations)
    assert pool.get_state() == states
    with pytest.raises(ConfigError, match=r"state is of stage 1-1 with skip=4.*stage 1-1 with skip=2"):
        Mario("1-1", skip=2).set_state(states[0])
    with pytest.raises(ValueError, match="the state lacks buttons and rng: give one that get_state"):
        env.set_state({"stage": "1-1", "skip": 4})
    with pytest.raises(ConfigError, match="after the end of its episode"):
        env.set_state({**states[0], "buttons": states[0]["buttons"] + [0x80] * 99})
    env.close()


@needs_emulator
def test_a_group_continues_from_its_state_in_the_file_of_a_run() -> None:
    """In the middle of an episode, and at its end: the next step is a reset."""
    config = EnvConfig(id="SuperMarioBros-1-1", kwargs={"actions": "two"})
    groups, rows = [make_group(config, [1]) for _ in range(2)], [group_rows() for _ in range(2)]
    for group, row in zip(groups, rows, strict=True):
        group.reset(row.observation)
    for num_steps in (5, 99):
        for _ in range(num_steps):
            groups[0].step(np.array([0]), rows[0])
            if rows[0].terminated.any():
                break
        groups[1].set_state(json.loads(json.dumps(groups[0].get_state())), rows[1].observation)
        np.testing.assert_array_equal(rows[1].observation[0], rows[0].observation[0])
    assert rows[0].terminated.all()
    for _ in range(3):
        for group, row in zip(groups, rows, strict=True):
            group.step(np.array([1]), row)
        for name in ("observation", "reward", "terminated", "valid"):
            np.testing.assert_array_equal(getattr(rows[0], name), getattr(rows[1], name), err_msg=name)
    for group in groups:
        group.close()


@needs_emulator
def test_an_actor_steps_them_as_a_vector_environment() -> None:
    config = EnvConfig(id="SuperMarioBros-1-1", kwargs={"actions": "right"})
    group = make_group(config, [1])
    assert group.spaces.observation == gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    assert group.spaces.action == gym.spaces.Discrete(5)
    rows = group_rows()
    group.reset(rows.observation)
    assert rows.observation[0].any()
    for _ in range(4):
        group.step(np.array([3]), rows)
    assert rows.reward[0] > 0.0 and rows.valid.all()
    group.close()


@needs_emulator
def test_the_benchmark_plays_the_newest_weights_of_a_run(
    tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {"engine": "inline", "actor.num_actors": 1, "network.hidden": (8,), "evaluation.episodes": 0}
    tiny |= {"replay.min_size": 8, "replay.capacity": 100, "replay.batch": 4, "stop.steps": 20}
    places = {"run.dir": str(tmp_path / "run"), "shm_dir": str(shm_dir)}
    config = replace(echelon.preset("mario", "SuperMarioBros-1-1"), **{**tiny, **places})
    assert echelon.train(config, output=io.StringIO()).summary["updates"] > 0
    words = ["mario_flags", str(tmp_path / "run"), "--episodes", "1", "--noop-max", "0"]
    outputs = []
    for more in (["--steps", "3"], ["--steps", "3", "--checkpoint", FINAL]):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        assert mario_flags.main() == 0
        outputs.append(capsys.readouterr().out.splitlines())
    assert outputs[0] == outputs[1] and outputs[0][-1] == "0 of 1 episodes reach the flag"
    assert outputs[0][0].startswith("episode 1: stuck, return ") and outputs[0][0].endswith(", 3 steps")


@pytest.mark.full
@needs_emulator
@pytest.mark.parametrize("name", STAGES)
def test_every_stage_starts_and_lets_mario_move(name: str) -> None:
    env = Mario(name, "right")
    _, info = env.reset()
    assert f"{info['world']}-{info['stage']}" == name
    moved = sum(reward for reward, _, _ in play(env, "11"))
    assert moved > 0.0
    env.close()


@pytest.mark.parametrize(
    ("id", "kwargs", "message"),
    [
        ("SuperMarioBros-9-1", {}, 'no stage "9-1": the stages are 1-1 to 8-4'),
        ("SuperMarioBros-1-5", {}, 'no stage "1-5"'),
        ("SuperMarioBros-1-1-v0", {}, 'no stage "1-1-v0"'),
        ("SuperMarioBros", {"stage": "0-1"}, 'no stage "0-1"'),
        ("SuperMarioBros-1-1", {"actions": "left"}, "actions='left' .* two, right, simple, complex"),
        ("SuperMarioBros-1-1", {"actions": ["left"]}, "actions=.* two, right, simple, complex"),
        ("SuperMarioBros-1-1", {"skip": 0}, "skip=0 .* at least 1"),
        ("SuperMarioBros-1-1", {"noop_max": 1.5}, r"noop_max=1\.5 .* at least 0"),
        ("SuperMarioBros-1-1", {"num_threads": 0}, "num_threads=0 .* at least 1"),
        ("SuperMarioBros-1-1", {"lives": 3}, "could not be created .*'lives'"),
    ],
)
def test_what_does_not_exist_is_named(id: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        probe_spaces(EnvConfig(id=id, kwargs=kwargs))


def test_without_its_packages_the_command_that_installs_them_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("nes_py", "gym_super_mario_bros"):
        monkeypatch.setitem(sys.modules, name, None)  # cannot be found
    assert main(["train", "dqn", "SuperMarioBros-1-1", *SHORT]) == 2
    told = capsys.readouterr().err.strip()
    assert "pip install --no-deps nes-py==" in told and "is not installed" in told and len(told.splitlines()) == 1
    assert main(["train", "dqn", "SuperMarioBros-1-9", *SHORT]) == 2
    assert 'no stage "1-9"' in capsys.readouterr().err
