"""The registry of presets. A preset is a function from an environment id to a configuration, marked `@register`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from echelon.algorithm_config import AlgorithmConfig
from echelon.config import TrainConfig

Preset = Callable[[str], TrainConfig]
Function = TypeVar("Function", bound=Preset)
PRESETS: dict[str, Preset] = {}
QUEUE_PRESETS: dict[str, Preset] = {}  # learn from each trajectory once, in order
REPLAY_PRESETS: dict[str, Preset] = {}  # learn from replayed transitions
DEFAULT_ENVS: dict[str, str] = {}  # of presets that are made for one environment
BY_EXPERIENCE = {"queue": QUEUE_PRESETS, "replay": REPLAY_PRESETS}


def register(algorithm: type[AlgorithmConfig], env: str = "") -> Callable[[Function], Function]:
    """Registers a function as a preset of `algorithm`; the preset's name is the function's, with - for _.

    `env` is the environment of a preset that is made for one.
    """

    def add(function: Function) -> Function:
        name = function.__name__.replace("_", "-")
        for presets in (PRESETS, BY_EXPERIENCE.get(algorithm.experience, {})):
            presets[name] = function
        if env:
            DEFAULT_ENVS[name] = env
        return function

    return add


def is_mario(env: str) -> bool:
    return env.split("-")[0] == "SuperMarioBros"
