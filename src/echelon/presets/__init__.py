"""Presets: named configurations, with hyperparameters that suit the environment's family.

Every algorithm has one module here: its config class, which names the parts of the algorithm, and its presets.
Importing the package imports all its modules, so a new file is found without being listed. None imports torch.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from pkgutil import iter_modules

from echelon.config import EnvId, TrainConfig
from echelon.errors import ConfigError
from echelon.presets.registry import DEFAULT_ENVS, PRESETS, REPLAY_PRESETS

FIRST = ("impala", "ppo", "a3c", "dqn", "ddpg", "sac")  # order of the help; other presets follow by name


def _discover() -> None:
    found = sorted(module.name for module in iter_modules(__path__))
    for name in sorted(found, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
        import_module(f"{__name__}.{name}")


_discover()
# After the discovery, so that a preset function replaces the submodule of the same name; type checkers need the names.
globals().update({function.__name__: function for function in PRESETS.values()})
from echelon.presets.a3c import a3c  # noqa: E402
from echelon.presets.ddpg import apex_ddpg, ddpg, td3  # noqa: E402
from echelon.presets.dqn import apex_dqn, dqn  # noqa: E402
from echelon.presets.impala import impala  # noqa: E402
from echelon.presets.ppo import async_ppo, ppo  # noqa: E402
from echelon.presets.sac import sac  # noqa: E402


def check_preset(name: str) -> None:
    """Raises ConfigError if there is no preset `name`."""
    if not isinstance(name, str):
        raise ConfigError(f'{name!r:.200} is not the name of a preset: write preset("ppo", make_env).')
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.5)  # they are short
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(f"there is no preset {name!r}. Presets: {', '.join(PRESETS)}.{hint}")


def preset(name: str, env: EnvId, family: str = "") -> TrainConfig:
    """Returns the configuration of the preset `name` for the environment `env`, with the values of the zoo.

    `family` is that of an environment whose id is not known: "images" or "vectors" (the default).
    """
    check_preset(name)
    return PRESETS[name](env, family)


__all__ = [
    "DEFAULT_ENVS",
    "PRESETS",
    "REPLAY_PRESETS",
    "a3c",
    "apex_ddpg",
    "apex_dqn",
    "async_ppo",
    "check_preset",
    "ddpg",
    "dqn",
    "impala",
    "ppo",
    "preset",
    "sac",
    "td3",
]
