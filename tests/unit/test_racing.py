"""CarRacing with learn-to-race's interface, and as small images."""

from __future__ import annotations

import importlib.util
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from echelon.config import EnvConfig
from echelon.envs.make import probe_spaces
from echelon.envs.racing import PixelPool, Pixels, Racing, controls, grey
from echelon.errors import ConfigError

pytest.importorskip("Box2D", reason='CarRacing needs box2d: pip install "echelon[box2d]"')
has_envpool = importlib.util.find_spec("envpool") is not None


def test_braking_is_acceleration_below_zero() -> None:
    actions = np.array([[0.5, 1.0], [-1.0, -0.25]], np.float32)
    np.testing.assert_allclose(controls(actions), [[0.5, 1.0, 0.0], [-1.0, 0.0, 0.25]])
    assert gym.spaces.Box(np.array([-1, 0, 0]), np.array([1, 1, 1]), dtype=np.float32).contains(controls(actions[0]))


@pytest.mark.filterwarnings("ignore:.*infinity:UserWarning")  # a pose has no bounds
@pytest.mark.parametrize("make", [Racing, Pixels])
def test_they_are_environments(make: Any) -> None:
    env = make()
    check_env(env, skip_render_check=True)
    env.close()
    assert probe_spaces(EnvConfig(id=make)).action == gym.spaces.Box(-1.0, 1.0, (2,), np.float32)


def test_the_pose_tells_how_the_car_moves() -> None:
    env = Racing()
    first, _ = env.reset(seed=3)
    assert first["pose"].shape == (30,) and first["camera"].shape == (96, 96, 3)
    for _ in range(30):
        seen, *_ = env.step(np.array([0.0, 1.0], np.float32))
    pose = seen["pose"]
    car: Any = env._env.unwrapped.car  # type: ignore[attr-defined]
    speed = np.hypot(*car.hull.linearVelocity)
    assert pose[4] == pytest.approx(speed, rel=1e-2) and pose[4] > 5.0 > abs(pose[3]), "forward, not to the side"
    assert pose[7] > 0.0, "and faster"
    np.testing.assert_allclose(pose[15:17], car.hull.position, rtol=1e-5)
    assert np.hypot(*(pose[15:17] - first["pose"][15:17])) > 1.0
    assert pose[18:22].min() > 0.0 and (pose[22:26] == 0.0).all() and pose[26:30].max() > 0.0
    seen, *_ = env.step(np.array([-0.5, -1.0], np.float32))
    assert seen["pose"][0] == -0.5 and (seen["pose"][22:26] == 1.0).all()
    env.close()


def test_pixels_are_the_newest_frames_of_the_road() -> None:
    """The same car with the same actions, frame by frame."""
    env, plain = Pixels(), gym.make("CarRacing-v3", disable_env_checker=True)
    stack, _ = env.reset(seed=5)
    frame, _ = plain.reset(seed=5)
    np.testing.assert_array_equal(stack, np.repeat(grey(frame)[None], 4, 0))
    expected = [grey(frame)] * 4
    for _ in range(3):
        action, total = np.array([0.3, 0.5], np.float32), 0.0
        for _ in range(4):
            frame, reward, *_ = plain.step(controls(action))
            total += float(reward)
        expected = [*expected[1:], grey(frame)]
        stack, reward, terminated, truncated, _ = env.step(action)
        np.testing.assert_array_equal(stack, expected)
        assert reward == pytest.approx(total) and not terminated and not truncated
    env.close()
    plain.close()


def test_patience_cuts_an_episode_off() -> None:
    env = Pixels(patience=3)
    env.reset(seed=5)
    ends = [env.step(np.array([0.0, -1.0], np.float32))[2:4] for _ in range(5)]
    assert (False, True) in ends and not any(terminated for terminated, _ in ends), "standing still visits nothing new"
    env.close()


@pytest.mark.skipif(has_envpool, reason="envpool is installed")
def test_without_envpool_it_is_said_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r'pip install "echelon\[envpool\]"\. Pixels does not need it'):
        probe_spaces(EnvConfig(id="echelon.envs.racing:PixelPool"))


@pytest.mark.skipif(not has_envpool, reason="envpool is not installed")
def test_the_pool_has_the_spaces_of_pixels() -> None:
    pool, single = PixelPool(3), Pixels()
    assert pool.single_observation_space == single.observation_space
    first, _ = pool.reset(seed=1)
    for _ in range(3):
        seen, reward, _, _, _ = pool.step(np.full((3, 2), 0.5, np.float32))
    assert seen.shape == (3, 4, 84, 84) and np.isfinite(reward).all() and not np.array_equal(first, seen)
    np.testing.assert_array_equal(first, np.repeat(first[:, :1], 4, 1))
    pool.close()
    single.close()
