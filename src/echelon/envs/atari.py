"""Atari games with ale_py's vector environment, preprocessed in C++.

The usual preprocessing: 4 frames per step with the maximum of the last two, 84x84 grey, 4 frames stacked (uint8
(4, 84, 84)), up to 30 no-op frames at a reset, one whole game per episode, truncated after 108,000 frames (27,000
steps). Rewards are raw, so that reported returns are true scores (algorithms clip the rewards that they learn from),
and actions are not sticky. `env.kwargs` overrides each setting.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

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
    "repeat_action_probability": 0.0,
    "full_action_space": False,
    "episodic_life": False,
    "reward_clipping": False,
    "max_num_frames_per_episode": 108_000,
    "autoreset_mode": AutoresetMode.NEXT_STEP,
}


def import_ale(env_id: str) -> None:
    """Imports ale_py, which registers its ids; raises ConfigError if it is not installed."""
    try:
        import ale_py  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f'env.id="{env_id}" needs the package ale-py: pip install ale-py.') from error


def atari_group(config: EnvConfig, spec: gym.envs.registration.EnvSpec, seeds: list[int]) -> VectorGroup:
    """Returns the group of the ALE game of `spec`."""
    from ale_py.vector_env import AtariVectorEnv

    if "batch_size" in config.kwargs:
        raise ConfigError(
            f"env.kwargs has batch_size={config.kwargs['batch_size']}, which steps only a part of a group; Echelon "
            "steps all environments. Remove batch_size and set actor.envs."
        )
    kwargs = {**DEFAULTS, **config.kwargs}
    game = spec.kwargs["game"]

    def make(seeds: list[int]) -> VectorEnv[Any, Any, Any]:
        env: VectorEnv[Any, Any, Any] = AtariVectorEnv(game, len(seeds), **kwargs)
        return env

    return VectorGroup(make, seeds, config.on_error, lambda env, seeds: np.array(seeds))
