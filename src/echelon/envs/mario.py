"""Super Mario Bros: the stages `SuperMarioBros-1-1` to `SuperMarioBros-8-4`, and the whole game, `SuperMarioBros`.

A step repeats its action for 4 frames and adds their rewards; it ends with the episode. Observations are the last 4
steps' pictures, grey and 84x84 (uint8 (4, 84, 84)), the newest last. The reward of a frame is Mario's move to the right
in pixels, minus the ticks of the clock, minus 25 if he dies, clipped to [-15, 15]. A stage ends with his death (the end
of its time is one) or at the flag (in a castle, at the axe); the whole game ends with its last life or its last castle.
The game has no randomness of its own: seeds matter only for `noop_max`.

Shapes: K environments, S frames of a stack.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from echelon.config import EnvConfig
from echelon.envs.mario_game import NUM_STAGES, NUM_WORLDS, Game, parse_stage
from echelon.envs.nes import Array
from echelon.envs.vector import VectorGroup
from echelon.errors import ConfigError

NAME = "SuperMarioBros"
SIDE = 84  # pixels
FRAMES_PER_SECOND = 60
STATE = frozenset(("stage", "skip", "buttons", "rng"))  # what a saved state has

A, B, UP, DOWN, LEFT, RIGHT = 0x01, 0x02, 0x10, 0x20, 0x40, 0x80
BUTTON_NAMES = {LEFT: "left", RIGHT: "right", UP: "up", DOWN: "down", A: "A", B: "B"}
RIGHT_ONLY = (0, RIGHT, RIGHT | A, RIGHT | B, RIGHT | A | B)
SIMPLE = (*RIGHT_ONLY, A, LEFT)
ACTIONS: dict[str, tuple[int, ...]] = {
    "two": (RIGHT, RIGHT | A),
    "right": RIGHT_ONLY,
    "simple": SIMPLE,
    "complex": (*SIMPLE, LEFT | A, LEFT | B, LEFT | A | B, DOWN, UP),
}


def _overlaps(num_pixels: int, num_cells: int) -> Array:
    """Returns (cells, pixels), how much of each pixel lies in each of equal cells, as whole numbers of a fraction."""
    cells, pixels = np.arange(num_cells)[:, None] * num_pixels, np.arange(num_pixels) * num_cells
    overlap: Array = np.minimum(cells + num_pixels, pixels + num_cells) - np.maximum(cells, pixels)
    return overlap.clip(0).astype(np.float32)


# Rows repeat 12 times (240 = 12 x 20, 84 = 12 x 7), columns 4 times (256 = 4 x 64, 84 = 4 x 21).
ROWS, COLUMNS = _overlaps(20, 7), _overlaps(64, 21).T.copy()


def grey(screen: Array) -> Array:
    """Converts a screen (240, 256, 4), blue first, to a grey image (84, 84) by averaging over areas.

    All sums are whole numbers below 2**24, so the matrix products are exact: the image is the same on every machine.
    Each of them is too small for BLAS to use several threads, which would cost more than they gain.
    """
    light = screen[..., 0] * np.uint16(29)
    light += screen[..., 1] * np.uint16(150)
    light += screen[..., 2] * np.uint16(77)
    light += np.uint16(128)
    light >>= 8
    rows = np.matmul(ROWS, light.astype(np.float32).reshape(12, 20, -1))
    image: Array = np.matmul(rows.reshape(12, 28, 64), COLUMNS).reshape(SIDE, SIDE)
    image /= 20 * 64
    image += 0.5
    return image.astype(np.uint8)


class Mario(gym.Env[Any, Any]):
    """One game of Super Mario Bros."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": FRAMES_PER_SECOND // 4}  # noqa: RUF012 (gymnasium's)

    def __init__(
        self,
        stage: str | None = None,
        actions: str = "simple",
        skip: int = 4,
        stack: int = 4,
        noop_max: int = 0,
        render_mode: str | None = None,
    ) -> None:
        """`stage` is "WORLD-STAGE", or None for the whole game; `actions` one of two, right, simple and complex.

        An episode starts with 0 to `noop_max` steps, a random number of them, in which no button is pressed.
        """
        if not isinstance(actions, str) or actions not in ACTIONS:
            raise ConfigError(f"actions={actions!r} is not one of the action sets of {NAME}: {', '.join(ACTIONS)}.")
        for name, value, least in (("skip", skip, 1), ("stack", stack, 1), ("noop_max", noop_max, 0)):
            _require_count(name, value, least)
        self.stage, self.render_mode = stage, render_mode
        self.game = Game(parse_stage(stage) if stage is not None else None)
        self._actions, self._skip, self._noop_max = ACTIONS[actions], skip, noop_max
        self._buttons = bytearray()  # of every step of the episode, no-ops included
        self._images = np.zeros((stack, SIDE, SIDE), np.uint8)
        names = [" ".join(name for bit, name in BUTTON_NAMES.items() if held & bit) or "none" for held in self._actions]
        self.metadata = {**self.metadata, "render_fps": max(FRAMES_PER_SECOND // skip, 1), "action_names": names}
        self.action_space = gym.spaces.Discrete(len(self._actions))
        self.observation_space = gym.spaces.Box(0, 255, self._images.shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._start()
        for _ in range(int(self.np_random.integers(self._noop_max + 1))):
            self._advance(0)
            if self.game.ended:  # a stage in which waiting kills
                self._start()
                break
        return self._images.copy(), self.game.info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.game.ended:
            raise gym.error.ResetNeeded("no episode is in play: call reset() before step().")
        if not 0 <= (index := int(action)) < len(self._actions):
            names = ", ".join(self.metadata["action_names"])
            raise gym.error.InvalidAction(f"action {index} is not one of 0 to {len(self._actions) - 1} ({names}).")
        reward = self._advance(self._actions[index])
        return self._images.copy(), reward, self.game.ended, False, self.game.info()

    def get_state(self) -> dict[str, Any]:
        """Returns the state of the episode and of the random numbers, for `set_state` of an equal environment.

        It consists of JSON values. The emulator's library cannot export its memory, so the state is the list of the
        buttons since the last reset.
        """
        rng = json.dumps(self.np_random.bit_generator.state)
        return {"stage": self.stage, "skip": self._skip, "buttons": list(self._buttons), "rng": rng}

    def set_state(self, state: Mapping[str, Any]) -> Any:
        """Replays the steps of a state of `get_state`, as fast as the emulator can; returns the observation."""
        if missing := STATE - state.keys():
            raise ValueError(f"the state lacks {' and '.join(sorted(missing))}: give one that get_state() returned.")
        if (state["stage"], state["skip"]) != (self.stage, self._skip):
            raise ConfigError(
                f"the state is of stage {state['stage']} with skip={state['skip']}, the environment has stage "
                f"{self.stage} with skip={self._skip}: restore it in an equal environment."
            )
        self._start()
        first_seen = len(state["buttons"]) - len(self._images)  # the stack has no pictures of earlier steps
        for i, buttons in enumerate(state["buttons"]):
            if self.game.ended:
                raise ConfigError(f"the state has steps after the end of its episode, from its step {i} on.")
            self._advance(buttons, see=i >= first_seen)
        self.np_random.bit_generator.state = json.loads(state["rng"])
        return self._images.copy()

    def render(self) -> Any:
        return self.game.emulator.screen[..., 2::-1].copy() if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        self.game.close()

    def _start(self) -> None:
        """Starts an episode without no-ops."""
        self.game.start()
        self._buttons.clear()
        self._images[:] = grey(self.game.emulator.screen)

    def _advance(self, buttons: int, see: bool = True) -> float:
        """Emulates the frames of a step; returns their reward. `see`: whether their picture is needed."""
        self._buttons.append(buttons)
        reward, self.game.flag_get = 0.0, False
        for _ in range(self._skip):
            reward += self.game.frame(buttons)
            if self.game.ended:
                break
        if see:
            self._images[:-1] = self._images[1:]
            self._images[-1] = grey(self.game.emulator.screen)
        return reward


class MarioPool(VectorEnv[Any, Any, Any]):
    """K games, stepped by `num_threads` threads of this process."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 (gymnasium's convention)

    def __init__(self, num_envs: int, num_threads: int = 1, **kwargs: Any) -> None:
        """`kwargs` are those of `Mario`."""
        _require_count("num_threads", num_threads, 1)
        self.num_envs = num_envs
        self.envs = [Mario(**kwargs) for _ in range(num_envs)]
        self._threads = ThreadPoolExecutor(num_threads) if num_threads > 1 else None
        self._ended = np.zeros(num_envs, np.bool_)
        self.render_mode = self.envs[0].render_mode
        self.metadata = {**self.envs[0].metadata, **self.metadata}
        self.single_action_space = self.envs[0].action_space
        self.single_observation_space = self.envs[0].observation_space
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """An int seeds the environments with seed, seed + 1, and so on."""
        if not isinstance(seed, Sequence):
            seed = [None if seed is None else seed + i for i in range(self.num_envs)]
        seeds = seed
        self._ended[:] = False
        results = self._map(lambda i: self.envs[i].reset(seed=seeds[i], options=options))
        observations, infos = zip(*results, strict=True)
        return np.stack(observations), self._infos(infos)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        def step_one(i: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            if self._ended[i]:
                observation, info = self.envs[i].reset()
                return observation, 0.0, False, False, info
            return self.envs[i].step(actions[i])

        observations, rewards, terminated, truncated, infos = zip(*self._map(step_one), strict=True)
        self._ended = np.array(terminated)
        return np.stack(observations), np.array(rewards), self._ended.copy(), np.array(truncated), self._infos(infos)

    def get_state(self) -> list[dict[str, Any]]:
        """Returns the state of every environment."""
        return [env.get_state() for env in self.envs]

    def set_state(self, states: Sequence[Mapping[str, Any]]) -> Any:
        """Continues the episodes of `states`, of as many environments; returns their observations."""
        observations = self._map(lambda i: self.envs[i].set_state(states[i]))
        self._ended = np.array([env.game.ended for env in self.envs])
        return np.stack(observations)

    def render(self) -> Any:
        return tuple(env.render() for env in self.envs)

    def close_extras(self, **kwargs: Any) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        for env in self.envs:
            env.close()

    def _map(self, function: Callable[[int], Any]) -> list[Any]:
        """Calls `function` with the index of every environment, in parallel if there are threads."""
        return list((self._threads.map if self._threads is not None else map)(function, range(self.num_envs)))

    def _infos(self, infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for i, info in enumerate(infos):
            merged = self._add_info(merged, info, i)
        return merged


def _require_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r} of {NAME} must be a whole number of at least {least}.")


ENTRY_POINT = f"{__name__}:{Mario.__qualname__}"
STAGES = tuple(f"{world}-{stage}" for world in range(1, NUM_WORLDS + 1) for stage in range(1, NUM_STAGES + 1))
for _id, _kwargs in [(NAME, {}), *((f"{NAME}-{stage}", {"stage": stage}) for stage in STAGES)]:
    gym.register(_id, ENTRY_POINT, vector_entry_point=f"{__name__}:{MarioPool.__qualname__}", kwargs=_kwargs)


def is_mario(spec: EnvSpec) -> bool:
    """Whether `spec` is of this module, and not of another package with such ids."""
    return spec.entry_point == ENTRY_POINT


def check_mario_id(id: str) -> None:
    """Raises ConfigError if `id` names a stage that does not exist."""
    if id.startswith(f"{NAME}-"):
        parse_stage(id.removeprefix(f"{NAME}-"))


def mario_group(config: EnvConfig, spec: EnvSpec, seeds: list[int]) -> VectorGroup:
    """Returns the group of the games of `spec`."""

    def make(seeds: list[int]) -> VectorEnv[Any, Any, Any]:
        return MarioPool(len(seeds), **{**spec.kwargs, **config.kwargs})

    return VectorGroup(make, seeds, config.on_error, lambda env, seeds: list(seeds))
