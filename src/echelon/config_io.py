"""Converts configurations to and from JSON and command-line text, and lists their fields.

A field is named by its dotted path ("actor.envs"). The functions work from the annotations of the fields, so a new
field needs no change here; only `env.kwargs` and the fields that take callables are treated specially. Values are
checked on construction.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from echelon.config import RENAMED, AlgorithmConfig, TrainConfig, current_fields, replace
from echelon.errors import ConfigError
from echelon.fields import ConfigField, Section, fields, is_union, near_fields, no_choice, unwrapped
from echelon.names import is_unnamed, text_of

NO_VALUES: Mapping[str, Any] = types.MappingProxyType({})
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class FieldInfo(msgspec.Struct, frozen=True):
    """One field: its dotted path, its annotation and its current value."""

    path: str
    field: ConfigField
    value: Any


def to_json(config: TrainConfig) -> dict[str, Any]:
    """Returns `config` as plain JSON values; callables become their names."""
    changes = {"env.kwargs": _plain(config.env.kwargs, "env.kwargs")}
    data: dict[str, Any] = msgspec.to_builtins(
        map_callables(replace(config, **changes), lambda _, value: text_of(value))
    )
    return data


def map_callables(config: TrainConfig, name: Callable[[str, Callable[..., Any]], str]) -> TrainConfig:
    """Returns `config` with `name(path, callable)` in place of every callable."""
    changes: dict[str, Any] = {}
    for info in fields_of(config):
        if info.field.takes_functions and callable(info.value):
            changes[info.path] = name(info.path, info.value)
        elif info.field.takes_functions and isinstance(info.value, tuple):
            named = (name(f"{info.path}.{i}", v) if callable(v) else v for i, v in enumerate(info.value))
            changes[info.path] = tuple(named)
    return replace(config, **changes)


def unnamed_callables(config: TrainConfig) -> dict[str, str]:
    """Returns the texts of callables that cannot be imported, by path."""
    found = {}
    for info in fields_of(config):
        values = info.value if isinstance(info.value, tuple) else (info.value,)
        for i, value in enumerate(values if info.field.takes_functions else ()):
            if isinstance(value, str) and is_unnamed(value):
                found[f"{info.path}.{i}" if values is info.value else info.path] = value
    return found


def from_json(data: Mapping[str, Any]) -> TrainConfig:
    """Returns the configuration that `to_json` wrote.

    A missing field takes its default; an unknown field or a value that does not fit raises ConfigError.
    """
    config: TrainConfig = _read(TrainConfig, data)
    return config


def set_fields(config: TrainConfig, texts: Mapping[str, str], values: Mapping[str, Any] = NO_VALUES) -> TrainConfig:
    """Returns a copy of `config` with dotted fields set from text: set_fields(config, {"actor.envs": "32"}).

    `values` are fields or whole sections that are set before.

    All fields change together, so fields that must fit each other can be given in any order.
    """
    replaced = {*texts, *(["actor.envs"] if "actor.total_envs" in texts else [])}
    values = {path: value for path, value in values.items() if path not in replaced}
    known = {info.path: info.field.hint for info in fields_of(config)}
    texts = current_fields({"stop.epochs" if path == "epochs" else path: text for path, text in texts.items()})
    for path, text in texts.items():
        if path not in known:
            raise _unknown(path, text, list(known))
    return replace(config, **values, **{path: _parse(known[path], text, path) for path, text in texts.items()})


def fields_of(config: Section) -> list[FieldInfo]:
    """Returns every field of `config`, including those of its sections, in the order of their definition."""
    found: list[FieldInfo] = []
    for field in fields(type(config)):
        value = getattr(config, field.name)
        found += fields_of(value) if isinstance(value, Section) else [FieldInfo(field.path, field, value)]
    return found


def _plain(value: Any, path: str) -> Any:
    """Returns `value` as a JSON value; raises ConfigError for types that JSON cannot represent."""
    match value:
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return value
        case tuple() | list():
            return [_plain(item, f"{path}.{i}") for i, item in enumerate(value)]
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _plain(item, f"{path}.{key}") for key, item in value.items()}
    raise ConfigError(
        f"{path}={value!r} cannot be written to config.json. Use None, a bool, a finite number, a string, or a list "
        "or dict (with string keys) of them."
    )


def _read(cls: type[Section], data: Any) -> Any:
    if cls is AlgorithmConfig:
        classes, name = AlgorithmConfig.classes(), data.get("name") if isinstance(data, Mapping) else None
        if not isinstance(name, str) or name not in classes:
            raise no_choice("algorithm.name", name, list(classes))
        cls = classes[name]
    if not isinstance(data, Mapping):
        where = cls.SECTION or "the configuration"
        raise ConfigError(f"{where}={data!r} must be an object with the fields of {cls.__name__}.")
    known, values = {field.name: field for field in fields(cls)}, {}
    for name, value in data.items():
        path = f"{cls.SECTION}.{name}".lstrip(".")
        if path in RENAMED:  # a run folder of an older release has the old name
            name, value = RENAMED[path].path.rpartition(".")[2], RENAMED[path].value(value)
        if name not in known:
            raise _unknown(path, value, [field.path for field in known.values()])
        values[name] = _read(known[name].hint, value) if known[name].is_section else value
    return cls(**values)


def _parse(hint: Any, text: str, path: str) -> Any:
    """Parses `text` as the type `hint`; text that does not parse is returned unchanged, and the section refuses it.

    Numbers may be written 1e6 or 1_000_000; tuples are comma-separated; dicts are JSON.
    """
    hint, word = unwrapped(hint), text.strip().lower()
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if is_union(hint):
        if types.NoneType in options and word == "none":
            return None
        return _parse(options[0], text, path)
    if origin is tuple:
        inner = text.strip()
        if inner[:1] in ("(", "["):
            inner = inner.strip("()[]")
        return tuple(_parse(options[0], item, path) for item in split_list(inner))
    if origin is dict:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}={text!r:.200} is not JSON ({error}). Write it as '{{\"name\": 1}}'.") from None
    if hint is bool:
        return BOOLEANS.get(word, text)
    if hint in (int, float):
        return _number(hint, word, text)
    return text


def split_list(text: str) -> list[str]:
    """Returns the items of a comma-separated list; commas within brackets and quotes do not separate."""
    items, depth, quote = [""], 0, ""
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[i - 1] != "\\" else quote
        elif char in "'\"" and depth:
            quote = char
        else:
            depth += (char in "([{") - (char in ")]}")
        if char == "," and depth <= 0 and not quote:
            items.append("")
        else:
            items[-1] += char
    return [item.strip() for item in items if item.strip()]


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


def _unknown(path: str, value: Any, known: list[str]) -> ConfigError:
    paths = sorted(known)
    inside = [other for other in paths if other.startswith(path + ".")]
    if inside:
        return ConfigError(f"{path}={value!r} names a section, not a field. Its fields: {', '.join(inside)}.")
    return ConfigError(f"{path}={value!r}: the configuration has no field {path}.{near_fields(path, paths)}")
