"""The presets by name: a preset is a function from an environment's id to a configuration, marked with `@register`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from echelon.algorithm_config import AlgorithmConfig
from echelon.config import TrainConfig

Preset = Callable[[str], TrainConfig]
Function = TypeVar("Function", bound=Preset)
PRESETS: dict[str, Preset] = {}
REPLAY_PRESETS: dict[str, Preset] = {}  # those that learn from replayed transitions


def register(rule: type[AlgorithmConfig]) -> Callable[[Function], Function]:
    """Makes a function a preset of `rule`, named as the function is, with - for _."""

    def add(function: Function) -> Function:
        name = function.__name__.replace("_", "-")
        PRESETS[name] = function
        if rule.experience == "replay":
            REPLAY_PRESETS[name] = function
        return function

    return add


def is_atari(env: str) -> bool:
    return env.startswith("ALE/")
