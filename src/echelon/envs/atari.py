"""Atari games with ale_py's vector environment, preprocessed in C++.

The usual preprocessing: 4 frames per step with the maximum of the last two, 84x84 grey, 4 frames stacked (uint8
(4, 84, 84)), up to 30 no-op frames at a reset, one whole game per episode, truncated after 108,000 frames (27,000
steps). Rewards are raw, so that reported returns are true scores (algorithms clip the rewards that they learn from).
The id decides whether actions are sticky: ALE/Pong-v5 and the ids of version 0 repeat the previous action with
probability 0.25, those of version 4 never. `env.kwargs` overrides each setting; render_mode="rgb_array" adds a second
emulator that renders in colour.
"""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from echelon.config import EnvConfig
from echelon.envs.vector import VectorGroup
from echelon.errors import ConfigError

DEFAULTS: dict[str, Any] = {
    "num_threads": 1,  # an actor uses one core
    "frameskip": 4,
    "img_height": 84,
    "img_width": 84,
    "grayscale": True,
    "stack_num": 4,
    "maxpool": True,
    "noop_max": 30,
    "episodic_life": False,
    "reward_clipping": False,
    "max_num_frames_per_episode": 108_000,
    "autoreset_mode": AutoresetMode.NEXT_STEP,
}
BY_ID = ("repeat_action_probability", "full_action_space")  # settings that an id's registration decides
SCREEN = {"grayscale": False, "img_height": 210, "img_width": 160, "stack_num": 1}
FRAMES_PER_SECOND = 60


class AtariScreens(VectorWrapper[Any, Any, Any, Any, Any]):
    """Adds `render` to ale_py's vector environment: a second one plays the same games, and observes their screens.

    Both have the same seeds and actions. They differ only in their observations, so the games stay equal.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], screens: VectorEnv[Any, Any, Any], frameskip: int) -> None:
        super().__init__(env)
        self._screens = screens
        names = [action.name for action in screens.ale.get_action_set()]  # type: ignore[attr-defined]
        self.metadata = {**env.metadata, "render_fps": FRAMES_PER_SECOND / frameskip, "action_names": names}

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._pictures, _ = self._screens.reset(seed=seed, options=options)
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._pictures = self._screens.step(actions)[0]
        return self.env.step(actions)

    def render(self) -> Any:
        return tuple(self._pictures[:, -1])

    def close(self, **kwargs: Any) -> None:
        self._screens.close()
        super().close(**kwargs)


def import_ale(env_id: str) -> None:
    """Imports ale_py, which registers its ids; raises ConfigError if it is not installed."""
    try:
        import ale_py  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f'env.id="{env_id}" needs the package ale-py: pip install "echelon[atari]".') from error


def find_game(name: str) -> EnvSpec | None:
    """Returns the registration of an Atari id.

    ale_py no longer registers PongDeterministic-v4: it is PongNoFrameskip-v4 with 4 frames per step.
    """
    spec = gym.registry.get(name)
    other = gym.registry.get(name.replace("Deterministic-v", "NoFrameskip-v"))
    if spec is None and other is not None:
        spec = copy.deepcopy(other)
        spec.kwargs["frameskip"] = 4
    return spec


def atari_group(config: EnvConfig, spec: EnvSpec, seeds: list[int]) -> VectorGroup:
    """Returns the group of the ALE game of `spec`."""
    from ale_py.vector_env import AtariVectorEnv

    if "batch_size" in config.kwargs:
        raise ConfigError(
            f"env.kwargs has batch_size={config.kwargs['batch_size']}, which steps only a part of a group; Echelon "
            "steps all environments. Remove batch_size and set actor.envs."
        )
    kwargs = {**DEFAULTS, **{name: spec.kwargs[name] for name in BY_ID if name in spec.kwargs}, **config.kwargs}
    renders = kwargs.get("render_mode") == "rgb_array"
    if renders:
        del kwargs["render_mode"]  # unknown to ale_py's vector environment
    game = spec.kwargs["game"]

    def make(seeds: list[int]) -> VectorEnv[Any, Any, Any]:
        env: VectorEnv[Any, Any, Any] = AtariVectorEnv(game, len(seeds), **kwargs)
        if renders:
            return AtariScreens(env, AtariVectorEnv(game, len(seeds), **{**kwargs, **SCREEN}), kwargs["frameskip"])
        return env

    return VectorGroup(make, seeds, config.on_error, lambda env, seeds: np.array(seeds))
