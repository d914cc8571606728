"""The presets by name: a preset is a function from an environment's id to a configuration, marked with `@register`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from echelon.config import TrainConfig

Preset = Callable[[str], TrainConfig]
Function = TypeVar("Function", bound=Preset)
PRESETS: dict[str, Preset] = {}


def register(function: Function) -> Function:
    """Makes `function` a preset, named as it is, with - for _."""
    PRESETS[function.__name__.replace("_", "-")] = function
    return function


def is_atari(env: str) -> bool:
    return env.startswith("ALE/")
