"""The trust rule: the code that a configuration of somebody else may name, and the mark of this user's own ones.

A configuration names environments, wrappers and networks by their import paths, and importing runs code. One that this
user did not write on this machine, from a learner or in a run folder, may therefore name only code of gymnasium,
EnvPool and Echelon, unless the user trusts whoever wrote it. A run folder's configuration carries a mark: the HMAC of
the names in it, with a key that only this user on this machine has. On another machine, or with other names, the mark
is not valid; other fields may be edited.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
from gymnasium.vector import VectorEnv

from echelon.config import TrainConfig
from echelon.errors import ConfigError
from echelon.names import path_of, resolve
from echelon.transport.secret import stretched, user_secret

PLAIN_ID = re.compile(r"([\w-]+/)?[\w.-]+")  # without a "module:" prefix, so nothing is imported for it
IMPORTING_IDS = ("GymV21Environment-v0", "GymV26Environment-v0")  # gymnasium's ids that import what their kwargs name
OURS = re.compile(r"echelon\.envs\.\w+:\w+")
KEY = "run-folder-key"  # the user's secret for marks; not the one for connections, which other users may share
PURPOSE = b"echelon run folder 1\n"


class Origin(NamedTuple):
    """Where a configuration comes from, and what a user can do who wants the code that it names; for messages."""

    name: str
    trust: str  # the option that accepts everything
    env: str = ""  # the option that names an environment in place of the configuration's
    wrappers: str = ""


LEARNER = Origin(
    "the learner",
    "--trust-learner (trust_learner=True) if you trust the person who runs the learner",
    "--env (env=...) on the worker",
    "--env and --env-wrapper (env=, env_wrapper=) on the worker",
)


def run_folder(config_file: Path) -> Origin:
    """Returns the origin of a configuration in a run folder that does not have this user's mark."""
    trust = (
        "--trust (trust=True) if you trust whoever wrote that: somebody else, another machine or an older release did, "
        "or it was edited afterwards"
    )
    return Origin(str(config_file), trust)


def check_names(config: TrainConfig, origin: Origin, *, env: bool = True) -> None:
    """Raises ConfigError if `config` names code of others; `env`: whether its environment is used."""
    if env and config.env.id and not is_known_env(config.env.id):
        raise _refused(origin, "env.id", config.env.id, [str(config.env.id)], origin.env)
    if env and config.env.wrappers:
        names = list(map(str, config.env.wrappers))
        raise _refused(origin, "env.wrappers", names, names, origin.wrappers)
    if config.network.name != "auto":
        raise _refused(origin, "network.name", config.network.name, [str(config.network.name)], "")


def is_known_env(id: object) -> bool:
    """Whether creating `id` imports only gymnasium's registered environments, EnvPool, or Echelon's environments."""
    if not isinstance(id, str) or id in IMPORTING_IDS:
        return False
    if OURS.fullmatch(id):
        # Modules of echelon.envs import other names too: only the classes that they define are environments.
        made = resolve(id)
        return isinstance(made, type) and issubclass(made, gym.Env | VectorEnv) and made.__module__ == id.split(":")[0]
    return PLAIN_ID.fullmatch(id.removeprefix("envpool:")) is not None


def mark(config_json: Mapping[str, Any]) -> str | None:
    """Returns this user's mark of the code that a configuration names; None if this user has no place for a key."""
    try:
        key = stretched(user_secret(KEY))
    except ConfigError:
        return None
    env, network = config_json.get("env", {}), config_json.get("network", {})
    named = [env.get("id"), env.get("kwargs"), env.get("wrappers"), network.get("name")]
    text = json.dumps(named, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, PURPOSE + text.encode(), hashlib.sha256).hexdigest()


def has_mark(config_json: Mapping[str, Any], found: object) -> bool:
    """Returns whether `found` is this user's mark of the code that a valid configuration names."""
    if not isinstance(found, str) or not found.isascii():
        return False
    expected = mark(config_json)
    return expected is not None and hmac.compare_digest(expected, found)


def _refused(origin: Origin, field: str, value: object, names: list[str], option: str) -> ConfigError:
    places = ", ".join(dict.fromkeys(filter(None, map(_place, names))))
    ways = f"{option}, or {origin.trust}" if option else origin.trust
    return ConfigError(
        f"{origin.name} asks for {field}={value!r}, code that would be imported{f' from {places}' * bool(places)} and "
        f"run. Accepted are only plain gymnasium ids, ALE/, envpool: and echelon.envs. Use {ways}."
    )


def _place(name: str) -> str:
    """Returns the file from which `name` would be imported, or "" if it is not known. Imports nothing."""
    module, _, _ = path_of(name).rpartition(":")
    if module.endswith(".py"):
        return str(Path(module).expanduser().absolute())
    top = module.partition(".")[0]  # to find a submodule would import its package
    spec = PathFinder.find_spec(top, [os.getcwd(), *sys.path]) if top else None
    return str(spec.origin or "") if spec is not None else ""
