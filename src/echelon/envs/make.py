"""From `EnvConfig` to a group of environments, whatever form its id has."""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AutoresetMode, VectorEnv

from echelon.config import EnvConfig
from echelon.envs.atari import atari_group, import_ale
from echelon.envs.envpool import envpool_group
from echelon.envs.loop import LoopGroup
from echelon.envs.vector import EnvFailed, EnvGroup, VectorGroup
from echelon.errors import ConfigError
from echelon.names import describe_callable, resolve
from echelon.schema import Spaces

__all__ = ["describe_callable", "env_seeds", "make_group", "probe_spaces", "resolve"]

Wrapper = Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]
GYM_ID = re.compile(r"([\w:-]+/)?[\w.:-]+-v\d+")


def make_group(config: EnvConfig, seeds: list[int], wrapper: Wrapper | None = None) -> EnvGroup:
    """The group of `len(seeds)` environments that `config` describes; `wrapper` is applied last to each of them."""
    id, wrap = config.id, functools.partial(_wrapped, config, wrapper)
    if not isinstance(id, str):
        return _factory_group(config, id, seeds, wrapper)
    if id.startswith("envpool:"):
        _refuse_wrappers(config, wrapper)
        return envpool_group(config, id.removeprefix("envpool:"), seeds)
    module, _, name = id.rpartition(":")
    if module and not GYM_ID.fullmatch(name):
        factory = resolve(id)
        if not callable(factory):
            raise ConfigError(f'env.id="{id}" is {factory!r:.80}; a factory of environments must be callable.')
        return _factory_group(config, factory, seeds, wrapper)
    spec = _find_spec(id, module, name)
    if config.vector == "loop" or (config.vector == "auto" and spec.namespace != "ALE"):
        return LoopGroup(wrap(lambda: _make_single(spec, config.kwargs)), seeds, config.on_error)
    _refuse_wrappers(config, wrapper)
    return atari_group(config, spec, seeds) if spec.namespace == "ALE" else _entry_point_group(config, spec, seeds)


def probe_spaces(config: EnvConfig) -> Spaces:
    """The spaces of one environment of `config`: makes it, checks them, closes it."""
    try:
        group = make_group(config, [0])
    except EnvFailed as error:
        id = config.id if isinstance(config.id, str) else _named(config.id)
        raise ConfigError(
            f"{id} could not be made with env.kwargs={config.kwargs}: {error.failure.error}. Check its keyword "
            "arguments (--env-kwargs), or the environment itself: make it once in Python to see where it fails."
        ) from error
    group.close()
    return group.spaces


def env_seeds(seed: int, actor: int, incarnation: int, num_envs: int) -> list[int]:
    """The 31-bit seeds of an actor's environments: repeatable, and others for every actor and after every restart."""
    seeds: dict[int, None] = {}
    for state in np.random.SeedSequence([seed, actor, incarnation]).generate_state(2 * num_envs + 8).tolist():
        seeds[state >> 1] = None
    return list(seeds)[:num_envs]


def _find_spec(id: str, module: str, name: str) -> EnvSpec:
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ConfigError(f'env.id="{id}" cannot import "{error.name}"; install its package.') from error
    if name.startswith("ALE/"):
        import_ale(id)
    spec = gym.registry.get(name)
    if spec is None:
        near = difflib.get_close_matches(name, gym.registry, n=3, cutoff=0.6)
        hint = f"Did you mean {' or '.join(near)}?" if near else "gymnasium.pprint_registry() lists those it knows."
        raise ConfigError(
            f'env.id="{id}" is no environment that gymnasium knows. {hint} One of another package is written '
            '"module:Id-v0" (the module registers it), "module:factory" or "path/to/file.py:factory".'
        )
    return spec


def _make_single(spec: EnvSpec, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    spec = copy.deepcopy(spec)
    spec.order_enforce = False  # a group resets before it steps; TimeLimit stays
    try:
        return gym.make(spec, disable_env_checker=True, **kwargs)
    except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise _missing_package(spec, spec.entry_point, error) from error


def _entry_point_group(config: EnvConfig, spec: EnvSpec, seeds: list[int]) -> VectorGroup:
    entry = spec.vector_entry_point
    if entry is None:
        raise ConfigError(
            f'env.vector="vector_entry_point", but {spec.id} registers none. Set env.vector="loop" (or "auto").'
        )

    def make(seeds: list[int]) -> VectorEnv[Any, Any, Any]:
        try:
            creator = load_env_creator(entry) if isinstance(entry, str) else entry
            kwargs = _with_autoreset(creator, config.kwargs)
            return gym.make_vec(spec, num_envs=len(seeds), vectorization_mode="vector_entry_point", **kwargs)
        except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
            raise _missing_package(spec, entry, error) from error

    return VectorGroup(make, seeds, config.on_error)


def _factory_group(
    config: EnvConfig, factory: Callable[..., Any], seeds: list[int], wrapper: Wrapper | None
) -> EnvGroup:
    """The group of a user's factory: one with a parameter `num_envs` makes vector environments."""
    if "num_envs" not in _parameters(factory):
        if config.vector == "vector_entry_point":
            raise ConfigError(
                f'env.vector="vector_entry_point", but the factory {_named(factory)} has no parameter num_envs, so it '
                'makes single environments. Set env.vector="loop" (or "auto"), or have it return a VectorEnv.'
            )
        make_single = _wrapped(config, wrapper, lambda: _single(factory, config.kwargs))
        return LoopGroup(make_single, seeds, config.on_error)
    _refuse_wrappers(config, wrapper)
    if config.vector == "loop":
        raise ConfigError(
            f'env.vector="loop", but the factory {_named(factory)} has a parameter num_envs, so it makes vector '
            'environments. Set env.vector="auto", or give a factory of single environments.'
        )

    def make(seeds: list[int]) -> VectorEnv[Any, Any, Any]:
        env = factory(**{**_with_autoreset(factory, config.kwargs), "num_envs": len(seeds)})
        if not isinstance(env, VectorEnv):
            raise ConfigError(
                f"the factory {_named(factory)} has a parameter num_envs but returned a {type(env).__name__}; it must "
                "return a gymnasium VectorEnv. Drop the parameter if it makes single environments."
            )
        return env

    return VectorGroup(make, seeds, config.on_error)


def _single(factory: Callable[..., Any], kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    env = factory(**kwargs)
    if isinstance(env, VectorEnv):
        env.close()
        raise ConfigError(
            f"the factory {_named(factory)} returned a VectorEnv; it must then have a parameter num_envs, so that an "
            "actor can ask for as many environments as it steps."
        )
    if not isinstance(env, gym.Env):
        raise ConfigError(
            f"the factory {_named(factory)} returned a {type(env).__name__}; it must return a gymnasium.Env or a "
            "gymnasium VectorEnv."
        )
    return env


def _wrapped(
    config: EnvConfig, last: Wrapper | None, make: Callable[[], gym.Env[Any, Any]]
) -> Callable[[], gym.Env[Any, Any]]:
    wrappers: list[tuple[str, object]] = [(name, resolve(name)) for name in config.wrappers]
    wrappers += [(_named(last), last)] if last is not None else []

    def make_wrapped() -> gym.Env[Any, Any]:
        env = make()
        for name, wrapper in wrappers:
            if not callable(wrapper):
                raise ConfigError(f'env.wrappers has "{name}", which is {wrapper!r:.80} and not callable.')
            env = wrapper(env)
            if not isinstance(env, gym.Env):
                raise ConfigError(
                    f'env.wrappers has "{name}", which returned a {type(env).__name__}; a wrapper takes a '
                    "gymnasium.Env and returns one."
                )
        return env

    return make_wrapped


def _refuse_wrappers(config: EnvConfig, wrapper: Wrapper | None) -> None:
    names = [*config.wrappers, *([_named(wrapper)] if wrapper is not None else [])]
    if names:
        raise ConfigError(
            f"env.wrappers={names} wrap single environments, and {config.id!r} makes a vector "
            'environment. Set env.vector="loop", or wrap it inside a factory of your own.'
        )


def _with_autoreset(creator: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs`, asking for NEXT_STEP where `creator` lets one choose."""
    return {"autoreset_mode": AutoresetMode.NEXT_STEP, **kwargs} if "autoreset_mode" in _parameters(creator) else kwargs


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (ValueError, TypeError):  # a builtin without a signature
        return set()


def _missing_package(spec: EnvSpec, entry: object, error: Exception) -> ConfigError:
    """The ConfigError that says what to install for `spec`; gymnasium's own families are extras of it."""
    family = re.match(r"gymnasium\.envs\.(\w+)", str(entry))
    if family:
        extra = {"phys2d": "jax", "tabular": "jax"}.get(family[1], family[1].replace("_", "-"))
        remedy = f'pip install "gymnasium[{extra}]"'
    elif isinstance(error, ModuleNotFoundError):
        remedy = f'install the package of the module "{error.name}"'
    else:
        remedy = "install what its package asks for"
    return ConfigError(f"{spec.id} needs a package that is not installed ({error}): {remedy}.")


def _named(factory: Callable[..., Any]) -> str:
    return f"{getattr(factory, '__module__', '?')}:{getattr(factory, '__qualname__', repr(factory))}"
