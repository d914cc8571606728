"""Adapts EnvPool to gymnasium's VectorEnv.

EnvPool resets an environment on the step after the end of its episode, which is NEXT_STEP. Its seeds are fixed when the
pool is created, and its spaces are those of a single environment.
"""

from __future__ import annotations

import importlib
from typing import Any

from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from echelon.config import EnvConfig
from echelon.envs.vector import VectorGroup
from echelon.errors import ConfigError


class EnvpoolVectorEnv(VectorEnv[Any, Any, Any]):
    """An EnvPool behind gymnasium's vector interface."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 (gymnasium's convention)

    def __init__(self, pool: Any, num_envs: int) -> None:
        self._pool = pool
        self.num_envs = num_envs
        self.single_observation_space = pool.observation_space
        self.single_action_space = pool.action_space
        self.observation_space = batch_space(pool.observation_space, num_envs)
        self.action_space = batch_space(pool.action_space, num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self._pool.reset()
        return observation, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self._pool.step(
            actions.astype(self.single_action_space.dtype, copy=False)
        )
        return observation, reward, terminated, truncated, info

    def close_extras(self, **kwargs: Any) -> None:
        self._pool.close()


def envpool_group(config: EnvConfig, task: str, seeds: list[int]) -> VectorGroup:
    """Returns the group of the EnvPool task `task`."""
    try:
        envpool: Any = importlib.import_module("envpool")  # optional and untyped
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'env.id="envpool:{task}" needs the package envpool: pip install "echelon[envpool]".'
        ) from error
    if task not in envpool.list_all_envs():
        raise ConfigError(f'envpool has no task "{task}"; envpool.list_all_envs() lists its tasks.')
    kwargs = {"num_threads": 1, **config.kwargs}

    def make(seeds: list[int]) -> VectorEnv[Any, Any, Any]:
        pool = envpool.make_gymnasium(task, num_envs=len(seeds), seed=seeds[0], **kwargs)
        return EnvpoolVectorEnv(pool, len(seeds))

    return VectorGroup(make, seeds, config.on_error)
