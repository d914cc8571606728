"""CarRacing-v3 with two other interfaces: that of learn-to-race, and small grey images for fast learning.

Both have two actions, steering and acceleration, each from -1 to 1; negative acceleration brakes. `Racing` observes the
car's state (`pose`, 30 numbers in learn-to-race's order) and a camera image. `Pixels` observes the last four camera
images, cropped to the road and grey, and repeats every action for four frames; `PixelPool` is the same with EnvPool and
ten times as fast. Rewards are those of CarRacing, so returns are true scores.

Shapes: K environments, S frames of a stack.
"""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from echelon.errors import ConfigError

Array = np.ndarray[Any, Any]
CAR_RACING = "CarRacing-v3"
POSE_SIZE = 30
SIDE = 84  # pixels; the rows below the crop show instruments, the columns beside it mostly grass
LEFT = 6
FRAME_SIDE = 96
GREEN = 1  # the colour channel in which road, grass, kerb and car differ most
ACTIONS = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)


def controls(action: Array) -> Array:
    """Converts steering and acceleration (..., 2) to CarRacing's steering, gas and brake (..., 3)."""
    steering, acceleration = action[..., 0], action[..., 1]
    return np.stack([steering, np.maximum(acceleration, 0.0), np.maximum(-acceleration, 0.0)], -1).astype(np.float32)


def grey(frames: Array) -> Array:
    """Crops CarRacing's frames (..., 96, 96, 3) to the road, as grey images (..., 84, 84)."""
    image: Array = frames[..., :SIDE, LEFT : LEFT + SIDE, GREEN]
    return image


def make_car_racing(**kwargs: Any) -> gym.Env[Any, Any]:
    try:
        return gym.make(CAR_RACING, disable_env_checker=True, **kwargs)
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(f'{CAR_RACING} needs box2d ({error}): pip install "echelon[box2d]".') from error


class Racing(gym.Env[Any, Any]):
    """CarRacing with learn-to-race's interface: two actions, and the observations `pose` and `camera`."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012 (gymnasium's convention)

    def __init__(self, **kwargs: Any) -> None:
        self._env = make_car_racing(**kwargs)
        self.render_mode = kwargs.get("render_mode")
        self.action_space = ACTIONS
        self.observation_space = gym.spaces.Dict(
            {
                "camera": gym.spaces.Box(0, 255, (FRAME_SIDE, FRAME_SIDE, 3), np.uint8),
                "pose": gym.spaces.Box(-np.inf, np.inf, (POSE_SIZE,), np.float32),
            }
        )
        self._controls, self._velocity = np.zeros(3, np.float32), np.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        frame, info = self._env.reset(seed=seed, options=options)
        self._controls, self._velocity = np.zeros(3, np.float32), np.zeros(2)
        return {"camera": frame, "pose": self._pose()}, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._controls = controls(np.asarray(action))
        frame, reward, terminated, truncated, info = self._env.step(self._controls)
        return {"camera": frame, "pose": self._pose()}, float(reward), terminated, truncated, info

    def _pose(self) -> Array:
        """Returns steering, gear, mode; velocity, acceleration, angular velocity (right, forward, up); yaw, pitch,
        roll; position; rotation, brake and torque of the four wheels. Entries that a flat world lacks are 0."""
        car: Any = self._env.unwrapped.car  # type: ignore[attr-defined]
        hull, fps = car.hull, self.metadata["render_fps"]
        forward, right = (np.asarray(hull.GetWorldVector(axis)) for axis in ((0, 1), (1, 0)))
        velocity = np.array([right @ hull.linearVelocity, forward @ hull.linearVelocity])
        acceleration = (velocity - self._velocity) * fps
        self._velocity = velocity
        x, y = hull.position
        steering, _, brake = self._controls
        pose = [steering, 1.0, 0.0, *velocity, 0.0, *acceleration, 0.0, 0.0, 0.0, hull.angularVelocity]
        pose += [hull.angle, 0.0, 0.0, x, y, 0.0]
        pose += [wheel.omega for wheel in car.wheels] + [brake] * 4 + [wheel.gas for wheel in car.wheels]
        return np.asarray(pose, np.float32)

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()


class Pixels(gym.Env[Any, Any]):
    """CarRacing with two actions, each repeated, and a stack of grey images (S, 84, 84)."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012 (gymnasium's convention)

    def __init__(self, repeat: int = 4, stack: int = 4, patience: int = 0, **kwargs: Any) -> None:
        """An episode is truncated after `patience` steps without a new road tile; 0: never, for comparable scores."""
        self._env = make_car_racing(**kwargs)
        self.render_mode = kwargs.get("render_mode")
        self._repeat, self._patience, self._idle = repeat, patience, 0
        self.metadata = {**self.metadata, "render_fps": 50 / repeat}
        self._images = np.zeros((stack, SIDE, SIDE), np.uint8)
        self.action_space = ACTIONS
        self.observation_space = gym.spaces.Box(0, 255, self._images.shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        frame, info = self._env.reset(seed=seed, options=options)
        self._images[:] = grey(frame)
        self._idle = 0
        return self._images.copy(), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        control, total, is_new = controls(np.asarray(action)), 0.0, False
        for _ in range(self._repeat):
            frame, reward, terminated, truncated, info = self._env.step(control)
            total += float(reward)
            is_new |= float(reward) > 0.0
            if terminated or truncated:
                break
        self._images[:-1] = self._images[1:]
        self._images[-1] = grey(frame)
        self._idle = 0 if is_new else self._idle + 1
        cut = self._patience > 0 and self._idle >= self._patience
        return self._images.copy(), total, terminated, truncated or cut, info

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()


class PixelPool(VectorEnv[Any, Any, Any]):
    """`Pixels`, K of them in an EnvPool: `echelon train sac echelon.envs.racing:PixelPool`."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 (gymnasium's convention)

    def __init__(self, num_envs: int, repeat: int = 4, stack: int = 4, patience: int = 0, num_threads: int = 1) -> None:
        """`num_threads` is that of the pool; the other parameters are those of `Pixels`."""
        try:
            self._envpool: Any = importlib.import_module("envpool")  # optional and untyped
        except ModuleNotFoundError as error:
            raise ConfigError(
                'PixelPool needs the package envpool: pip install "echelon[envpool]". Pixels does not need it.'
            ) from error
        self.num_envs = num_envs
        self._repeat, self._patience, self._num_threads = repeat, patience, num_threads
        self._pool: Any = None  # created in `reset`: its seed is fixed on creation
        self._images = np.zeros((num_envs, stack, SIDE, SIDE), np.uint8)
        self._idle, self._ended = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.bool_)
        self.single_action_space = ACTIONS
        self.single_observation_space = gym.spaces.Box(0, 255, self._images.shape[1:], np.uint8)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self._pool is None or seed is not None:
            self.close_extras()
            settings = {"num_envs": self.num_envs, "num_threads": self._num_threads, "seed": int(seed or 0)}
            self._pool = self._envpool.make_gymnasium(CAR_RACING, **settings)
        frames, _ = self._pool.reset()
        self._images[:] = grey(frames)[:, None]
        self._idle[:], self._ended[:] = 0, False
        return self._images.copy(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        control = controls(actions)
        rewards, ends = np.zeros(self.num_envs, np.float64), np.zeros((2, self.num_envs), np.bool_)
        is_new, playing = np.zeros(self.num_envs, np.bool_), np.flatnonzero(~self._ended)
        self._images[playing, :-1] = self._images[playing, 1:]
        self._begin(np.flatnonzero(self._ended))
        for _ in range(self._repeat):
            if not len(playing):
                break
            frames, reward, terminated, truncated, info = self._pool.step(control[playing], playing.astype(np.int32))
            envs = info["env_id"]  # in order of arrival
            rewards[envs] += reward
            is_new[envs] |= reward > 0.0
            ends[:, envs] = terminated, truncated
            self._images[envs, -1] = grey(frames)
            playing = np.sort(envs[~(terminated | truncated)])
        self._idle = np.where(is_new | self._ended, 0, self._idle + 1)
        cut = (self._patience > 0) & (self._idle >= self._patience)
        self._ended = ends.any(0) | cut
        return self._images.copy(), rewards, ends[0], ends[1] | cut, {}

    def _begin(self, envs: Array) -> None:
        """Starts an episode in `envs`."""
        if len(envs):
            frames, info = self._pool.reset(envs.astype(np.int32))
            self._images[info["env_id"]] = grey(frames)[:, None]

    def close_extras(self, **kwargs: Any) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
