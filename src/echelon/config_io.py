"""Configurations as JSON, as command-line text and as a list of fields, read off the dataclasses themselves.

A field is named by its dotted path ("actor.envs"). Nothing here knows a single field: a new one in `config.py` is
written, read, parsed and listed without a change. Validation is construction: every change builds new dataclasses.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import io
import json
import math
import sys
import tokenize
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from echelon.config import AlgorithmConfig, TrainConfig
from echelon.errors import ConfigError

BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field a user can set: its dotted path, its type as text, its value now, and what the source says of it."""

    path: str
    type: str
    default: Any
    comment: str


def to_json(config: TrainConfig, env_text: str | None = None) -> dict[str, Any]:
    """`config` as plain JSON values; a callable env.id is written as `env_text`, or else as "module:qualname"."""
    data: dict[str, Any] = _encode(config, "")
    if env_text is not None:
        data["env"]["id"] = env_text
    return data


def from_json(data: Mapping[str, Any]) -> TrainConfig:
    """The configuration that `to_json` wrote; a field left out takes its default, anything unfitting raises."""
    config: TrainConfig = _decode_section(TrainConfig, data, "")
    return config


def set_fields(config: TrainConfig, texts: Mapping[str, str]) -> TrainConfig:
    """`config` with dotted fields set from text: set_fields(config, {"actor.envs": "32", "run.dir": "out"}).

    All fields of a section change at once, so two that only fit together can be given in any order.
    """
    known = {info.path for info in fields_of(config)}
    changes: dict[str, Any] = {}
    for path, text in texts.items():
        if path not in known:
            raise _unknown(path, text, known)
        *sections, name = path.split(".")
        level = changes
        for section in sections:
            level = level.setdefault(section, {})
        owner: Any = type(functools.reduce(getattr, sections, config))
        hint = _hints(owner)[name]
        level[name] = _decode(hint, _parse(hint, text, path), path)
    changed: TrainConfig = _apply(config, changes)
    return changed


def fields_of(config: Any, prefix: str = "") -> list[FieldInfo]:
    """Every field of `config` in the order of the source, sections unfolded."""
    found: list[FieldInfo] = []
    owner: Any = type(config)
    hints = _hints(owner)
    for field in dataclasses.fields(config):
        value, path = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            found += fields_of(value, path + ".")
        else:
            found.append(FieldInfo(path, _describe(hints[field.name]), value, _comment(owner, field.name)))
    return found


def _encode(value: Any, path: str) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return value
        case tuple() | list():
            return [_encode(item, f"{path}.{i}") for i, item in enumerate(value)]
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _encode(item, f"{path}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _encode(getattr(value, name), f"{path}.{name}".lstrip(".")) for name in names}
    if callable(value) and path == "env.id":
        return f"{getattr(value, '__module__', '?')}:{getattr(value, '__qualname__', type(value).__qualname__)}"
    raise ConfigError(
        f"{path}={value!r} cannot be written to config.json. Use None, a bool, a finite number, a string, or a list "
        "or dict (with string keys) of them."
    )


def _decode_section(cls: Any, data: Any, path: str) -> Any:
    where = path or "the configuration"
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}={data!r} must be an object with the fields of {cls.__name__}.")
    hints = _hints(cls)
    values: dict[str, Any] = {}
    for key, item in data.items():
        inner = f"{path}.{key}" if path else str(key)
        if key not in hints:
            raise _unknown(inner, item, [f"{path}.{name}" if path else name for name in hints])
        values[key] = _decode(hints[key], item, inner)
    return cls(**values)


def _decode(hint: Any, value: Any, path: str) -> Any:
    """`value` (of JSON, or already right) as `hint` asks for it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if hint is AlgorithmConfig:
        return _decode_algorithm(value, path)
    if dataclasses.is_dataclass(hint):
        return _decode_section(hint, value, path)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(hint, value, path)
    if origin is Literal and isinstance(value, str | int) and value in arguments:
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_decode(arguments[0], item, f"{path}.{i}") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _decode(arguments[1], item, f"{path}.{key}") for key, item in value.items()}
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if hint in (bool, int, str) and type(value) is hint:
        return value
    raise _unfit(hint, value, path)


def _decode_algorithm(value: Any, path: str) -> Any:
    name = value.get("name") if isinstance(value, Mapping) else None
    if name not in AlgorithmConfig.classes:
        raise _unfit(Literal[tuple(AlgorithmConfig.classes)], name, f"{path}.name")
    return _decode_section(AlgorithmConfig.classes[name], value, path)


def _decode_union(hint: Any, value: Any, path: str) -> Any:
    options = typing.get_args(hint)
    if value is None and types.NoneType in options:
        return None
    for option in options:
        if typing.get_origin(option) is Callable or option is types.NoneType:
            continue  # a callable is never read from JSON; None was answered above
        try:
            return _decode(option, value, path)
        except ConfigError:
            continue
    raise _unfit(hint, value, path)


def _parse(hint: Any, text: str, path: str) -> Any:
    """The JSON value that `text` stands for where `hint` is wanted; unfitting text is returned for `_decode` to refuse.

    Numbers may be written 1e6 or 1_000_000; tuples are comma-separated; dicts are JSON.
    """
    options, word = typing.get_args(hint), text.strip().lower()
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if types.NoneType in options and word == "none":
            return None
        return _parse(next(option for option in options if option is not types.NoneType), text, path)
    if origin is tuple:
        inner = text.strip().strip("()[]")
        return [_parse(options[0], item.strip(), path) for item in inner.split(",") if item.strip()]
    if origin is dict:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}={text!r} is not JSON ({error}). Write it as '{{\"name\": 1}}'.") from None
    if hint is bool:
        return BOOLEANS.get(word, text)
    if hint in (int, float):
        return _number(hint, word, text)
    return text


def _number(hint: type, word: str, text: str) -> Any:
    try:
        return int(word)
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return text
    return int(number) if hint is int and number.is_integer() else number


def _apply(config: Any, changes: Mapping[str, Any]) -> Any:
    values = {
        name: _apply(getattr(config, name), value) if dataclasses.is_dataclass(getattr(config, name)) else value
        for name, value in changes.items()
    }
    return dataclasses.replace(config, **values)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _comment(cls: Any, name: str) -> str:
    """What stands behind a field in the class that declares it last."""
    owner = next(owner for owner in cls.__mro__ if name in owner.__annotations__)
    return _comments(owner.__module__).get((owner.__name__, name), "")


@functools.cache
def _comments(module_name: str) -> dict[tuple[str, str], str]:
    """The comment behind each dataclass field of a module, by (class, field); empty where the source is not at hand."""
    try:
        source = inspect.getsource(sys.modules[module_name])
    except (OSError, TypeError):
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    behind = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    return {
        (owner.name, line.target.id): behind[line.lineno]
        for owner in ast.parse(source).body
        if isinstance(owner, ast.ClassDef)
        for line in owner.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.lineno in behind
    }


def _describe(hint: Any) -> str:
    """A type as a user reads it: int, auto|cpu, int or none, comma-separated int."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe(option) for option in arguments)
    if origin is tuple:
        return f"comma-separated {_describe(arguments[0])}"
    if origin is dict:
        return "JSON object"
    if origin is Callable:
        return "callable"
    names: dict[Any, str] = {types.NoneType: "none", bool: "true|false", float: "finite number"}
    return names.get(hint) or str(getattr(hint, "__name__", hint))


def _unfit(hint: Any, value: Any, path: str) -> ConfigError:
    if typing.get_origin(hint) is not Literal:
        return ConfigError(f"{path}={value!r} does not fit: {_describe(hint)} is wanted.")
    allowed = [str(option) for option in typing.get_args(hint)]
    return ConfigError(f"{path}={value!r} does not fit: use {' or '.join(allowed)}.{_guess(str(value), allowed)}")


def _unknown(path: str, value: Any, known: Iterable[str]) -> ConfigError:
    paths = sorted(known)
    inside = [other for other in paths if other.startswith(path + ".")]
    if inside:
        return ConfigError(f"{path}={value!r} names a section, not a field. Its fields: {', '.join(inside)}.")
    section, _, name = path.rpartition(".")
    beside = [other for other in paths if other.rpartition(".")[0] == section] if section else paths
    by_name = {other.rpartition(".")[2]: other for other in beside or paths}
    hint = _guess(name, by_name, by_name) or f" Fields there: {', '.join(beside or paths)}."
    return ConfigError(f"{path}={value!r}: the configuration has no field {path}.{hint}")


def _guess(word: str, known: Iterable[str], meant: Mapping[str, str] = types.MappingProxyType({})) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {meant.get(close[0], close[0])}?" if close else ""
