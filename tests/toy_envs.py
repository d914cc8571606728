"""Toy environments whose every row can be foretold."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

Step = tuple[Any, float, bool, bool, dict[str, Any]]


class CounterEnv(gym.Env[Any, Any]):
    """Observes (episode, t, a draw of this episode); rewards 100 * episode + t; ends after `length` steps."""

    def __init__(self, length: int = 3, truncate: bool = False) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.length, self.truncate = length, truncate
        self.episode, self.t, self.draw = 0, 0, 0

    def observation(self) -> Any:
        return np.array([self.episode, self.t, self.draw], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t, self.draw = self.episode + 1, 0, int(self.np_random.integers(1 << 20))
        return self.observation(), {}

    def step(self, action: Any) -> Step:
        assert self.t < self.length, "stepped after its end"
        self.t += 1
        over = self.t == self.length
        return self.observation(), 100.0 * self.episode + self.t, over and not self.truncate, over and self.truncate, {}


class DawdlingEnv(CounterEnv):
    """A counter whose steps take long."""

    def step(self, action: Any) -> Step:
        time.sleep(0.02)
        return super().step(action)


class KeptEnv(CounterEnv):
    """A counter whose episodes can be saved and continued."""

    def get_state(self) -> Any:
        rng = self.np_random.bit_generator.state
        return {"episode": self.episode, "t": self.t, "draw": self.draw, "rng": rng}

    def set_state(self, state: Any) -> Any:
        self.episode, self.t, self.draw = state["episode"], state["t"], state["draw"]
        self.np_random.bit_generator.state = state["rng"]
        return self.observation()


class KeptVectorEnv(SyncVectorEnv):
    """Counters that are saved together."""

    def __init__(self, num_envs: int, length: int) -> None:
        super().__init__([lambda: KeptEnv(length)] * num_envs)

    def get_state(self) -> Any:
        return [self._autoreset_envs.tolist(), [env.unwrapped.get_state() for env in self.envs]]

    def set_state(self, state: Any) -> Any:
        self._autoreset_envs[:] = state[0]
        return np.stack([env.unwrapped.set_state(one) for env, one in zip(self.envs, state[1], strict=True)])


def make_kept_vector(num_envs: int, length: int) -> KeptVectorEnv:
    return KeptVectorEnv(num_envs, length)


class OpenEndedEnv(KeptEnv):
    """Rewards the number of the step, and ends when there is a file `folder`/end.

    The first episode to end writes there what it was: "DRAW STEPS".
    """

    def __init__(self, folder: str) -> None:
        super().__init__(length=1 << 40)
        self.folder = Path(folder)

    def step(self, action: Any) -> Step:
        observation, *_ = super().step(action)
        is_over = (self.folder / "end").exists()
        if is_over:
            with contextlib.suppress(FileExistsError), (self.folder / "ended").open("x") as file:
                file.write(f"{self.draw} {self.t}")
        return observation, float(self.t), is_over, False, {}


class TreeEnv(CounterEnv):
    """The counter as a Dict with a Tuple, a Discrete and a float64 Box; its actions are 5, 6 and 7."""

    def __init__(self, length: int = 3) -> None:
        super().__init__(length)
        self.observation_space = gym.spaces.Dict(
            {
                "z": gym.spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
                "a": gym.spaces.Tuple((gym.spaces.Discrete(1000), gym.spaces.MultiBinary(2))),
            }
        )
        self.action_space = gym.spaces.Discrete(3, start=5)
        self.last_action = 0

    def observation(self) -> Any:
        binary = np.array([self.t % 2, 1], np.int8)
        return {"z": np.full((2, 2), self.t + 0.5), "a": (self.last_action, binary)}

    def step(self, action: Any) -> Step:
        assert self.action_space.contains(action), action
        self.last_action = int(action)
        return super().step(action)


class MaskedEnv(CounterEnv):
    """Allows one action a step, another one every time, and raises at all others."""

    def __init__(self) -> None:
        super().__init__(length=7)
        x = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.observation_space = gym.spaces.Dict({"x": x, "action_mask": gym.spaces.MultiBinary(5)})
        self.action_space = gym.spaces.Discrete(5)

    @property
    def allowed(self) -> int:
        return (self.draw + 2 * self.t) % 5

    def observation(self) -> Any:
        return {"x": super().observation(), "action_mask": (np.arange(5) == self.allowed).astype(np.int8)}

    def step(self, action: Any) -> Step:
        if action != self.allowed:
            raise ValueError(f"action {action} is forbidden: the mask allows {self.allowed}")
        return super().step(action)


class ForceEnv(CounterEnv):
    """Continuous actions, which it changes in place; the reward is what it received."""

    def __init__(self, dtype: str) -> None:
        super().__init__(length=100)
        self.action_space = gym.spaces.Box(-2.0, 2.0, (1,), np.dtype(dtype).type)

    def step(self, action: Any) -> Step:
        assert action.dtype == self.action_space.dtype
        received = float(action[0])
        action *= 0.0
        observation, _, terminated, truncated, info = super().step(0)
        return observation, received, terminated, truncated, info


class FragileEnv(CounterEnv):
    """Raises in its step `fail_at` (0: the first), its reset or its making, while `log["failures"]` is above 0."""

    def __init__(self, log: dict[str, Any], fail_at: int = -1, where: str = "step") -> None:
        super().__init__(length=4)
        self.log, self.fail_at, self.where, self.made = log, fail_at, where, 0
        log["made"] = log.get("made", 0) + 1
        if where == "make":
            self._fail()

    def _fail(self) -> None:
        if self.log["failures"] > 0:
            self.log["failures"] -= 1
            raise RuntimeError("the simulator burnt down")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.log.setdefault("seeds", []).append(seed)
        if self.where == "reset" or (self.where == "remake" and self.log["made"] > 1):
            self._fail()
        return super().reset(seed=seed)

    def step(self, action: Any) -> Step:
        if self.where in ("step", "remake") and self.made == self.fail_at:
            self._fail()
        self.made += 1
        return super().step(action)

    def close(self) -> None:
        self.log["closed"] = self.log.get("closed", 0) + 1
        raise OSError("and it cannot even be closed")


class LiarEnv(CounterEnv):
    """Returns something else than its space says, from its second step on."""

    def __init__(self, what: str) -> None:
        super().__init__(length=10)
        self.what = what

    def step(self, action: Any) -> Step:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.t == 2 and self.what == "shape":
            observation = np.zeros(7, np.float32)
        if self.t == 2 and self.what == "reward":
            reward = np.array([1.0, 2.0])  # type: ignore[assignment]
        return observation, reward, terminated, truncated, info


class CastEnv(CounterEnv):
    """Declares two bytes and returns floats: whole numbers up to step `after`, then `value`. Records its actions."""

    actions: ClassVar[list[Any]] = []

    def __init__(self, value: float = 0.5, after: int = 30, is_dict: bool = False) -> None:
        super().__init__(length=1000)
        space = gym.spaces.Box(0, 255, (2,), np.uint8)
        self.value, self.after, self.is_dict = value, after, is_dict
        self.observation_space = gym.spaces.Dict({"x": space, "y": space}) if is_dict else space

    def observation(self) -> Any:
        x = np.array([0.0, self.value if self.t > self.after else 1.0], np.float32)
        return {"x": np.ones(2, np.uint8), "y": x} if self.is_dict else x

    def step(self, action: Any) -> Step:
        self.actions.append(action)
        return super().step(action)


def make_cast_vector(num_envs: int, value: float = 0.5) -> SyncVectorEnv:
    """Declares two bytes and returns the floats of its environments."""

    def make() -> CastEnv:
        env = CastEnv(value)
        env.observation_space = gym.spaces.Box(0, 255, (2,), np.float32)
        return env

    env = SyncVectorEnv([make] * num_envs)
    env.single_observation_space = CastEnv().observation_space
    return env


class PaintedEnv(TreeEnv):
    """The tree, which renders: (length + 1) columns of 8 pixels, white up to its step; rewards are the actions.

    Its info has what the caption of Super Mario Bros shows. `close_at` is the step at which the user closes the window.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(self, length: int = 7, render_mode: str | None = None, fail_at: int = -1, close_at: int = -1) -> None:
        super().__init__(length)
        self.render_mode, self.fail_at, self.close_at = render_mode, fail_at, close_at

    def info(self) -> dict[str, Any]:
        place = {"x_pos": 40 + self.t, "time": 400 - self.t, "world": 1, "stage": 1, "flag_get": self.t == self.length}
        return {**place, "score": 100 * self.t, "coins": self.t, "life": 2}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=seed)[0], self.info()

    def step(self, action: Any) -> Step:
        observation, _, terminated, truncated, _ = super().step(action)
        if self.t == self.fail_at:
            raise RuntimeError("the simulator burnt down")
        return observation, float(action), terminated, truncated, self.info()

    def render(self) -> Any:
        if self.t == self.close_at:
            import pygame

            pygame.event.post(pygame.event.Event(pygame.QUIT))
        picture = np.zeros((40, 8 * (self.length + 1), 3), np.uint8)
        picture[:, : 8 * (self.t + 1)] = 255
        return picture if self.render_mode == "rgb_array" else None


class Doubled(gym.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> Any:
        return 2.0 * reward


class StutteringVectorEnv(VectorEnv[Any, Any, Any]):
    """Claims NEXT_STEP, but ends again on its reset step."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2)
        self.action_space = gym.spaces.MultiDiscrete([2] * num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros((self.num_envs, 1), np.float32), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        ones = np.ones(self.num_envs)
        return np.zeros((self.num_envs, 1), np.float32), ones, ones > 0, ones < 0, {}


def make_counter(length: int = 3, truncate: bool = False) -> CounterEnv:
    return CounterEnv(length, truncate)


def make_vector(num_envs: int, autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([CounterEnv] * num_envs, autoreset_mode=autoreset_mode)


def make_painted_vector(num_envs: int, render_mode: str | None = None) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([lambda: PaintedEnv(render_mode=render_mode)] * num_envs)


def make_tree_vector(num_envs: int) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([TreeEnv] * num_envs)


def make_same_step(num_envs: int) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([CounterEnv] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def make_fragile_vector(num_envs: int, log: dict[str, Any], fail_at: int) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([lambda: FragileEnv(log, fail_at)] * num_envs)


def make_vector_without_count() -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([CounterEnv] * 2)


def make_one_too_many(num_envs: int) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([CounterEnv] * (num_envs + 1))


def make_one_that_ends(num_envs: int) -> VectorEnv[Any, Any, Any]:
    """Counters whose episodes never end, but for the first one's."""
    return SyncVectorEnv([CounterEnv, *[lambda: CounterEnv(1 << 40)] * (num_envs - 1)])


def make_nothing() -> None:
    return None


def make_single_with_count(num_envs: int) -> CounterEnv:
    return CounterEnv(num_envs)


def lose(env: CounterEnv) -> None:
    return None


class StrayEnv(gym.Env[Any, Any]):
    """Says that it observes 0 to 2, and observes 3 at its second step."""

    observation_space = gym.spaces.Discrete(3)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return 0, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return 3 if self.t == 2 else 1, 0.0, False, False, {}


class StillEnv(gym.Env[Any, Any]):
    """CartPole's spaces, and nothing to see."""

    observation_space = gym.make("CartPole-v1").observation_space
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Step:
        return np.zeros(4, np.float32), 0.0, True, False, {}

    def render(self) -> Any:
        return None


class UnpaintableEnv(StillEnv):
    def render(self) -> Any:
        raise RuntimeError("no paint")


def make_closing(render_mode: str | None = None) -> PaintedEnv:
    return PaintedEnv(render_mode=render_mode, close_at=3)


def make_burning(render_mode: str | None = None) -> PaintedEnv:
    return PaintedEnv(render_mode=render_mode, fail_at=5)


class Film(gym.Env[Any, Any]):
    """Observes its last four frames; frame i of all episodes is filled with i, and an episode starts with one frame."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (4, 8, 8), np.uint8)
        self.action_space = gym.spaces.Discrete(2)
        self.frame, self.t = 0, 0

    def look(self) -> Any:
        numbers = np.maximum(np.arange(self.frame - 3, self.frame + 1), self.frame - self.t)
        return np.broadcast_to(numbers[:, None, None], (4, 8, 8)).astype(np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.frame, self.t = self.frame + 1, 0
        return self.look(), {}

    def step(self, action: Any) -> Step:
        self.frame, self.t = self.frame + 1, self.t + 1
        return self.look(), float(self.frame), self.t == 10, False, {}


class FaultyEnv(CounterEnv):
    """A masked counter with one fault: `fault` names it, and "" has none. Counts its makings and steps in a file."""

    def __init__(self, fault: str = "", log: str = "") -> None:
        super().__init__(length=5)
        if fault == "creation":
            raise RuntimeError("there is no simulator")
        self.fault, self.log = fault, log
        self.observation_space = gym.spaces.Dict(
            {
                "x": gym.spaces.Box(-1e4, 1e4, (3,), np.float32),
                "picture": gym.spaces.Box(0, 255, (12, 16, 3), np.uint8),
                "action_mask": gym.spaces.MultiBinary(2),
            }
        )
        self._write("made")

    def _write(self, what: str) -> None:
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{what}\n")

    def observation(self) -> Any:
        x = np.zeros(4 if self.fault == "shape" and self.t else 3, np.float32)
        x[1] = {"nan": np.nan, "infinity": np.inf, "bounds": 2e4}.get(self.fault, 0.5) if self.t == 2 else 0.0
        picture = np.full((12, 16, 3), 0.5 if self.fault == "dtype" else 7)
        picture = picture if self.fault == "dtype" else picture.astype(np.uint8)
        mask = np.array([self.fault != "mask" or self.t != 2, 0], np.int8)
        tree = {"x": x.astype(np.float64) if self.fault == "float64" else x, "picture": picture, "action_mask": mask}
        return {"x": x} if self.fault == "entry" else tree

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self.fault == "slow":
            time.sleep(20.0)
        if self.fault == "again" and self.t:
            raise RuntimeError("it cannot be reset twice")
        if self.fault == "draw":
            self.draw = int(np.random.default_rng().integers(1 << 30))
        observation, info = super().reset(seed=seed)
        if self.fault == "draw":
            observation["x"][0] = np.random.default_rng().uniform()
        return observation if self.fault == "reset" else (observation, info)

    def step(self, action: Any) -> Any:
        assert action == 0, "the mask allows only action 0"
        self._write("step")
        observation, reward, terminated, truncated, info = super().step(action)
        if self.fault == "raise" and self.t == 2:
            raise RuntimeError("the simulator burnt down")
        if self.fault == "step":
            return observation, reward, terminated, info
        if self.fault == "done":
            return observation, reward, "no", truncated, info
        reward = {"reward": np.nan, "rewards": np.ones(2)}.get(self.fault, reward)
        return observation, reward, terminated, truncated, info


class SeedlessEnv(CounterEnv):
    """Its reset takes no seed."""

    def reset(self) -> tuple[Any, dict[str, Any]]:  # type: ignore[override]
        return super().reset()


def make_faulty_vector(num_envs: int, fault: str = "") -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([lambda: FaultyEnv(fault)] * num_envs)


def make_flat_rewards(num_envs: int) -> VectorEnv[Any, Any, Any]:
    """Gives one reward for all environments."""

    class FlatRewards(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            observation, reward, *rest = super().step(actions)
            return observation, float(reward.sum()), *rest

    return FlatRewards([CounterEnv] * num_envs)
