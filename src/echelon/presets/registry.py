"""The presets by name: a preset is a function from an environment's id to a configuration, marked with `@register`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from echelon.algorithm_config import AlgorithmConfig
from echelon.config import TrainConfig

Preset = Callable[[str], TrainConfig]
Function = TypeVar("Function", bound=Preset)
PRESETS: dict[str, Preset] = {}
QUEUE_PRESETS: dict[str, Preset] = {}  # those that learn from trajectories, once and in order
REPLAY_PRESETS: dict[str, Preset] = {}  # those that learn from replayed transitions
BY_EXPERIENCE = {"queue": QUEUE_PRESETS, "replay": REPLAY_PRESETS}


def register(rule: type[AlgorithmConfig]) -> Callable[[Function], Function]:
    """Makes a function a preset of `rule`, named as the function is, with - for _."""

    def add(function: Function) -> Function:
        name = function.__name__.replace("_", "-")
        for presets in (PRESETS, BY_EXPERIENCE.get(rule.experience, {})):
            presets[name] = function
        return function

    return add


def is_atari(env: str) -> bool:
    return env.startswith("ALE/")
