"""What a worker makes because its learner says so: only what names no code but gymnasium's, EnvPool's and ours.

A configuration names environments, wrappers and networks by where they are imported from, and importing runs code. So
whoever plays a learner could run anything on its workers; other names must be given on the worker itself.
"""

from __future__ import annotations

import re

import gymnasium as gym
from gymnasium.vector import VectorEnv

from echelon.config import TrainConfig
from echelon.errors import ConfigError
from echelon.names import resolve

PLAIN_ID = re.compile(r"([\w-]+/)?[\w.-]+")  # no "module:" before it, so nothing is imported for it
IMPORTING_IDS = ("GymV21Environment-v0", "GymV26Environment-v0")  # gymnasium's, which import what their kwargs name
OURS = re.compile(r"echelon\.envs\.\w+:\w+")
BY_HAND = "--trust-learner (trust_learner=True) if you trust whoever runs it"


def check_names(config: TrainConfig, *, env: bool) -> None:
    """Raises ConfigError where `config`, a learner's, names code of its own choice; `env`: its environment is used."""
    if env and not is_known_env(config.env.id):
        raise _refused("env.id", config.env.id, "--env (env=...)")
    if env and config.env.wrappers:
        raise _refused("env.wrappers", list(config.env.wrappers), "--env and --env-wrapper (env=, env_wrapper=)")
    if config.network.name != "auto":
        raise _refused("network.name", config.network.name, "")


def is_known_env(id: object) -> bool:
    """Whether making `id` imports nothing but what gymnasium has registered, EnvPool, or an environment of ours."""
    if not isinstance(id, str) or id in IMPORTING_IDS:
        return False
    if OURS.fullmatch(id):
        # Modules of ours hold other modules by name, too: only classes that they define are environments.
        made = resolve(id)
        return isinstance(made, type) and issubclass(made, gym.Env | VectorEnv) and made.__module__ == id.split(":")[0]
    return PLAIN_ID.fullmatch(id.removeprefix("envpool:")) is not None


def _refused(field: str, value: object, option: str) -> ConfigError:
    ways = f"{option}, or {BY_HAND}" if option else BY_HAND
    return ConfigError(
        f"the learner asks for {field}={value!r}, code that this worker would import and run. From a learner it takes "
        f"only plain gymnasium ids, ALE/, envpool: and echelon.envs. Name it here, with {ways}."
    )
