"""The registry of presets. A preset is a function from an environment to a configuration, marked `@register`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from echelon.algorithm_config import AlgorithmConfig
from echelon.config import TrainConfig
from echelon.errors import ConfigError
from echelon.presets.zoo import tuned

Preset = Callable[..., TrainConfig]  # preset(env, family)
Function = TypeVar("Function", bound=Preset)
PRESETS: dict[str, Preset] = {}
QUEUE_PRESETS: dict[str, Preset] = {}  # learn from each trajectory once, in order
REPLAY_PRESETS: dict[str, Preset] = {}  # learn from replayed transitions
DEFAULT_ENVS: dict[str, str] = {}  # of presets that are made for one environment
BY_EXPERIENCE = {"queue": QUEUE_PRESETS, "replay": REPLAY_PRESETS}


def register(algorithm: type[AlgorithmConfig], env: str = "") -> Callable[[Function], Function]:
    """Registers a function as a preset of `algorithm`; the preset's name is the function's, with - for _.

    The function returns the values for an environment that nobody has seen; those of the zoo for this preset and its
    environment are added to them. A preset may build on another one, whose values of the zoo it then has, too. `env`
    is the environment of a preset that is made for one.
    """

    def add(function: Function) -> Function:
        name = function.__name__.replace("_", "-")

        @functools.wraps(function)
        def with_zoo(*arguments: Any, **keywords: Any) -> TrainConfig:
            if stray := sorted(keywords.keys() - {"env", "family"}):
                change = '**{"stop.steps": N}'
                raise ConfigError(
                    f"{function.__name__}(..., {stray[0]}=...): a preset has the arguments env and family. Set fields "
                    f"with echelon.config.replace({function.__name__}(...), {change})."
                )
            config = function(*arguments, **keywords)
            family = keywords.get("family", arguments[1] if len(arguments) > 1 else "")
            return tuned(config, name, family)

        for presets in (PRESETS, BY_EXPERIENCE.get(algorithm.experience, {})):
            presets[name] = with_zoo
        if env:
            DEFAULT_ENVS[name] = env
        return cast(Function, with_zoo)

    return add
