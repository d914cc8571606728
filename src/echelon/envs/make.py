"""Creates a group of environments from an `EnvConfig`, for every form of `env.id`."""

from __future__ import annotations

import ast
import copy
import difflib
import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AutoresetMode, VectorEnv

from echelon.config import EnvConfig, replace
from echelon.envs.atari import atari_group, find_game, import_ale
from echelon.envs.envpool import envpool_group
from echelon.envs.loop import LoopGroup
from echelon.envs.mario import check_mario_id, is_mario, mario_group
from echelon.envs.vector import EnvFailed, EnvGroup, VectorGroup
from echelon.errors import ConfigError, UnsuitableEnvError
from echelon.families import is_atari
from echelon.names import UNNAMED, describe_callable, import_module, path_of, resolve, short_name, text_of
from echelon.schema import Spaces

__all__ = ["check_id", "describe_callable", "env_seeds", "make_group", "probe_spaces", "resolve", "with_rendering"]

Wrapper = Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]
BULLET = ("pybullet", "pybullet_envs_gymnasium")  # modules of the extra "pybullet"
EXTRAS = ("box2d", "mujoco")  # Echelon's extras that contain those of gymnasium
GYM_ID = re.compile(r"([\w:-]+/)?[\w.:-]+-v\d+")


def make_group(config: EnvConfig, seeds: list[int], wrapper: Wrapper | None = None) -> EnvGroup:
    """Returns a group of `len(seeds)` environments of `config`; `wrapper` is applied last to each of them."""
    id, wrap = config.id, functools.partial(_wrapped, config, wrapper)
    if not isinstance(id, str):
        return _factory_group(config, id, seeds, wrapper)
    if id.startswith("envpool:"):
        _refuse_wrappers(config, wrapper)
        return envpool_group(config, id.removeprefix("envpool:"), seeds)
    module, _, name = path_of(id).rpartition(":")
    if module and not GYM_ID.fullmatch(name):
        factory = resolve(id)
        if not callable(factory):
            raise ConfigError(f'env.id="{id}" is {factory!r:.80}; an environment factory must be callable.')
        return _factory_group(config, factory, seeds, wrapper)
    spec = _find_spec(id, module, name)
    vector_group = atari_group if is_atari(id) and "game" in spec.kwargs else mario_group if is_mario(spec) else None
    if config.vector == "loop" or (config.vector == "auto" and vector_group is None):
        return LoopGroup(wrap(lambda: _make_single(spec, config.kwargs)), seeds, config.on_error)
    _refuse_wrappers(config, wrapper)
    return (vector_group or _entry_point_group)(config, spec, seeds)


def probe_spaces(config: EnvConfig, check: Callable[[EnvGroup], None] | None = None) -> Spaces:
    """Returns the spaces of an environment of `config`: creates it, checks its spaces and closes it.

    `check` is called with the group of this one environment before it is closed.
    """
    try:
        group = make_group(config, [0])
    except EnvFailed as error:
        id = config.id if isinstance(config.id, str) else _named(config.id)
        raise ConfigError(
            f"{id} could not be created with env.kwargs={config.kwargs}: {error.failure.error}. Check its keyword "
            "arguments (--env-kwargs), or create the environment in Python to see where it fails."
        ) from error
    try:
        if check is not None:
            check(group)
    finally:
        group.close()
    return group.spaces


def with_rendering(config: EnvConfig) -> EnvConfig:
    """Returns `config` with render_mode="rgb_array", or `config` if its environment cannot be created with that."""
    rendering = replace(config, kwargs={**config.kwargs, "render_mode": "rgb_array"})
    try:
        make_group(rendering, [0]).close()
    except EnvFailed:
        return config
    return rendering


def env_seeds(seed: int, actor: int, incarnation: int, num_envs: int) -> list[int]:
    """Returns 31-bit seeds for an actor's environments: reproducible, and different per actor and incarnation."""
    seeds: dict[int, None] = {}
    for state in np.random.SeedSequence([seed, actor, incarnation]).generate_state(2 * num_envs + 8).tolist():
        seeds[state >> 1] = None
    return list(seeds)[:num_envs]


def actor_start(generation: int, incarnation: int = 0) -> int:
    """Returns the number of a start of an actor for `env_seeds`; it is unique."""
    return (generation << 16) + incarnation


def check_id(id: str) -> None:
    """Raises ConfigError if `id` looks like an id of gymnasium, but is not registered with it.

    No other package is imported: ids of Atari games, and those that name a module, are not checked.
    """
    if GYM_ID.fullmatch(id) and ":" not in id and not is_atari(id):
        _find_spec(id, "", id)


def _find_spec(id: str, module: str, name: str) -> EnvSpec:
    if module:
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            command = ': pip install "echelon[pybullet]"' if error.name in BULLET else ""
            raise ConfigError(f'env.id="{id}" cannot import "{error.name}"; install its package{command}.') from error
    if is_atari(id):
        import_ale(id)
    elif not module:
        check_mario_id(id)
    spec = find_game(name) if is_atari(id) else gym.registry.get(name)
    if spec is None:
        if "BulletEnv" in name and not module:
            raise ConfigError(f'env.id="{id}" is registered by PyBullet: write "pybullet_envs_gymnasium:{id}".')
        if id.endswith(".py") and (path := Path(id)).is_file():
            raise ConfigError(
                f'env.id="{id}" is a file: write {id}:NAME, with one of its classes or functions{_defined_in(path)}.'
            )
        near = difflib.get_close_matches(name, gym.registry, n=3, cutoff=0.6)
        hint = f"Did you mean {' or '.join(near)}?" if near else "gymnasium.pprint_registry() lists all ids."
        raise ConfigError(
            f'env.id="{id}" is not registered with gymnasium. {hint} Write an environment of another package '
            'as "module:Id-v0" (the module registers it), "module:factory" or "path/to/file.py:factory".'
        )
    return spec


def _defined_in(path: Path) -> str:
    """Returns the public classes and functions of a file, which is not run: " (Maze, make)"; "" if there are none."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return ""
    found = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    names = [name for name in found if not name.startswith("_")]
    return f" ({', '.join(names)})" if names else ""


def _make_single(spec: EnvSpec, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    spec = copy.deepcopy(spec)
    spec.order_enforce = False  # a group always resets before it steps; TimeLimit stays
    try:
        return gym.make(spec, disable_env_checker=True, **kwargs)
    except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise _missing_package(spec, spec.entry_point, error) from error


def _entry_point_group(config: EnvConfig, spec: EnvSpec, seeds: list[int]) -> VectorGroup:
    entry = spec.vector_entry_point
    if entry is None:
        raise ConfigError(
            f'env.vector="vector_entry_point", but {spec.id} registers no vector entry point. Set env.vector="loop" '
            '(or "auto").'
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
    """Returns the group of a user's factory; a factory with a parameter `num_envs` creates vector environments."""
    if "num_envs" not in _parameters(factory):
        if config.vector == "vector_entry_point":
            raise ConfigError(
                f'env.vector="vector_entry_point", but the factory {_named(factory)} has no parameter num_envs, so it '
                'creates single environments. Set env.vector="loop" (or "auto"), or give it num_envs and return a '
                "VectorEnv."
            )
        make_single = _wrapped(config, wrapper, lambda: _single(factory, config.kwargs))
        return LoopGroup(make_single, seeds, config.on_error)
    _refuse_wrappers(config, wrapper)
    if config.vector == "loop":
        raise ConfigError(
            f'env.vector="loop", but the factory {_named(factory)} has a parameter num_envs, so it creates '
            'vector environments. Set env.vector="auto", or use a factory of single environments.'
        )

    def make(seeds: list[int]) -> VectorEnv[Any, Any, Any]:
        env = factory(**{**_with_autoreset(factory, config.kwargs), "num_envs": len(seeds)})
        if not isinstance(env, VectorEnv):
            raise UnsuitableEnvError(
                f"the factory {_named(factory)} has a parameter num_envs but returned a {type(env).__name__}; it must "
                "return a gymnasium VectorEnv. Remove the parameter if it creates single environments."
            )
        return env

    return VectorGroup(make, seeds, config.on_error)


def _single(factory: Callable[..., Any], kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    env = factory(**kwargs)
    if isinstance(env, VectorEnv):
        env.close()
        raise UnsuitableEnvError(
            f"the factory {_named(factory)} returned a VectorEnv but has no parameter num_envs. Add it, so that an "
            "actor can choose the number of environments."
        )
    if not isinstance(env, gym.Env):
        raise UnsuitableEnvError(
            f"the factory {_named(factory)} returned a {type(env).__name__}; it must return a "
            "gymnasium.Env or a gymnasium VectorEnv. Derive the class from one of them."
        )
    return env


def _wrapped(
    config: EnvConfig, last: Wrapper | None, make: Callable[[], gym.Env[Any, Any]]
) -> Callable[[], gym.Env[Any, Any]]:
    wrappers = [(one, resolve(one)) if isinstance(one, str) else (_named(one), one) for one in config.wrappers]
    wrappers += [(_named(last), last)] if last is not None else []

    def make_wrapped() -> gym.Env[Any, Any]:
        env = make()
        for name, wrapper in wrappers:
            if not callable(wrapper):
                raise ConfigError(f'env.wrappers has "{name}", which is {wrapper!r:.80} and not callable.')
            try:
                env = wrapper(env)
            except TypeError as error:  # most likely its arguments
                raise ConfigError(
                    f'env.wrappers has "{name}", which raised TypeError: {error}. It is called with the environment '
                    'and the arguments in its name: "module:name(size=3)".'
                ) from error
            if not isinstance(env, gym.Env):
                raise ConfigError(
                    f'env.wrappers has "{name}", which returned a {type(env).__name__}; a wrapper must take '
                    "and return a gymnasium.Env."
                )
        return env

    return make_wrapped


def _refuse_wrappers(config: EnvConfig, wrapper: Wrapper | None) -> None:
    names = [one if isinstance(one, str) else _named(one) for one in (*config.wrappers, wrapper) if one is not None]
    if names:
        raise ConfigError(
            f"env.wrappers={names} apply to single environments, but {short_name(config.id)} creates a vector "
            'environment. Set env.vector="loop", or wrap it in your own factory.'
        )


def _with_autoreset(creator: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns `kwargs` with NEXT_STEP autoreset, if `creator` accepts the mode."""
    return {"autoreset_mode": AutoresetMode.NEXT_STEP, **kwargs} if "autoreset_mode" in _parameters(creator) else kwargs


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (ValueError, TypeError):  # a builtin without a signature
        return set()


def _missing_package(spec: EnvSpec, entry: object, error: Exception) -> ConfigError:
    """Returns the ConfigError that names what to install for `spec`; families of gymnasium are extras."""
    family = re.match(r"gymnasium\.envs\.(\w+)", str(entry))
    if family:
        extra = {"phys2d": "jax", "tabular": "jax"}.get(family[1], family[1].replace("_", "-"))
        remedy = f'pip install "{"echelon" if extra in EXTRAS else "gymnasium"}[{extra}]"'
    elif isinstance(error, ModuleNotFoundError):
        remedy = f'install the package of the module "{error.name}"'
    else:
        remedy = "install the dependencies of its package"
    return ConfigError(f"{spec.id} needs a package that is not installed ({error}): {remedy}.")


def _named(factory: Callable[..., Any]) -> str:
    return text_of(factory).removeprefix(UNNAMED)
