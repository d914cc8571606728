"""Presets: a name for a choice of values on the one data path, with values that suit the environment's family.

A learning rule has one module here: the config class, which names the parts of the rule, and the presets that use it.
All modules of this package are imported with it, so a new file is found without being listed. None imports torch.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from pkgutil import iter_modules

from echelon.config import TrainConfig
from echelon.errors import ConfigError
from echelon.presets.registry import PRESETS, REPLAY_PRESETS, is_atari

FIRST = ("impala", "ppo", "a3c", "dqn", "ddpg", "sac")  # as help lists them; the others follow by name


def _discover() -> None:
    found = sorted(module.name for module in iter_modules(__path__))
    for name in sorted(found, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
        import_module(f"{__name__}.{name}")


_discover()
# Below the discovery: a function is found here in place of the module of the same name, and type checkers know ours.
globals().update({function.__name__: function for function in PRESETS.values()})
from echelon.presets.a3c import a3c  # noqa: E402
from echelon.presets.ddpg import apex_ddpg, ddpg  # noqa: E402
from echelon.presets.dqn import apex_dqn, dqn  # noqa: E402
from echelon.presets.impala import impala  # noqa: E402
from echelon.presets.ppo import async_ppo, ppo  # noqa: E402
from echelon.presets.sac import sac  # noqa: E402


def preset(name: str, env: str) -> TrainConfig:
    """The configuration that `name` stands for on `env`."""
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}.{hint}")
    return PRESETS[name](env)


__all__ = [
    "PRESETS",
    "REPLAY_PRESETS",
    "a3c",
    "apex_ddpg",
    "apex_dqn",
    "async_ppo",
    "ddpg",
    "dqn",
    "impala",
    "is_atari",
    "ppo",
    "preset",
    "sac",
]
