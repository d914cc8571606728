"""Checks on the configuration that a worker receives: it may name only code of gymnasium, EnvPool and Echelon.

A configuration names environments, wrappers and networks by their import paths, and importing runs code. A malicious
learner could therefore run anything on its workers. Other names must be given on the worker itself.
"""

from __future__ import annotations

import re

import gymnasium as gym
from gymnasium.vector import VectorEnv

from echelon.config import TrainConfig
from echelon.errors import ConfigError
from echelon.names import resolve

PLAIN_ID = re.compile(r"([\w-]+/)?[\w.-]+")  # without a "module:" prefix, so nothing is imported for it
IMPORTING_IDS = ("GymV21Environment-v0", "GymV26Environment-v0")  # gymnasium's ids that import what their kwargs name
OURS = re.compile(r"echelon\.envs\.\w+:\w+")
TRUST = "--trust-learner (trust_learner=True) if you trust the person who runs the learner"


def check_names(config: TrainConfig, *, env: bool) -> None:
    """Raises ConfigError if the learner's `config` names other code; `env`: whether its environment is used."""
    if env and not is_known_env(config.env.id):
        raise _refused("env.id", config.env.id, "--env (env=...)")
    if env and config.env.wrappers:
        raise _refused("env.wrappers", list(config.env.wrappers), "--env and --env-wrapper (env=, env_wrapper=)")
    if config.network.name != "auto":
        raise _refused("network.name", config.network.name, "")


def is_known_env(id: object) -> bool:
    """Whether creating `id` imports only gymnasium's registered environments, EnvPool, or Echelon's environments."""
    if not isinstance(id, str) or id in IMPORTING_IDS:
        return False
    if OURS.fullmatch(id):
        # Modules of echelon.envs import other names too: only the classes that they define are environments.
        made = resolve(id)
        return isinstance(made, type) and issubclass(made, gym.Env | VectorEnv) and made.__module__ == id.split(":")[0]
    return PLAIN_ID.fullmatch(id.removeprefix("envpool:")) is not None


def _refused(field: str, value: object, option: str) -> ConfigError:
    ways = f"{option}, or {TRUST}" if option else TRUST
    return ConfigError(
        f"the learner asks for {field}={value!r}, code that this worker would import and run. From a learner it "
        f"accepts only plain gymnasium ids, ALE/, envpool: and echelon.envs. Name it on the worker, with {ways}."
    )
