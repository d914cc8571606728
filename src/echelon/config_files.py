"""Configuration files: values in TOML or JSON, or the config.json of a run, and a configuration written as TOML.

TOML has no null: None is written "none". A file of values changes those of the preset; a run's config.json is complete.
"""

from __future__ import annotations

import json
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.config import RENAMED, TrainConfig
from echelon.config_io import fields_of, from_json, to_json
from echelon.errors import ConfigError
from echelon.fields import ConfigField, fields, is_union, near_fields, unwrapped

RECORD = "config.json"  # of a run folder
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
MAX_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The content of a configuration file."""

    path: Path
    values: Mapping[str, Any] = field(default_factory=dict)  # by dotted path, as the file has them
    complete: TrainConfig | None = None  # of a run's config.json

    @property
    def preset(self) -> str:
        return self.complete.preset if self.complete is not None else self._text("preset")

    @property
    def env(self) -> str:
        return str(self.complete.env.id) if self.complete is not None else self._text("env.id")

    def _text(self, path: str) -> str:
        value = self.values.get(path, "")
        if not isinstance(value, str):
            raise ConfigError(f"{self.path}: {path}={value!r} does not fit: expected a name.")
        return value

    def changes(self, base: TrainConfig) -> dict[str, Any]:
        """Returns the values for `replace(base, ...)`; raises ConfigError for a key that `base` does not have."""
        if self.complete is not None:
            return {name: getattr(self.complete, name) for name in TrainConfig.__struct_fields__}
        known = {info.path: info.field for info in fields_of(base)}
        found = {}
        for path, value in self.values.items():
            path, value = (RENAMED[path].path, RENAMED[path].value(value)) if path in RENAMED else (path, value)
            if path == "algorithm.name" and value != base.algorithm.name:
                raise ConfigError(
                    f"{self.path}: algorithm.name={value!r} does not fit the preset {base.preset}, whose algorithm is "
                    f"{base.algorithm.name}."
                )
            if path not in known:
                raise ConfigError(
                    f"{self.path}: the configuration of {base.preset} has no field {path}.{near_fields(path, known)}"
                )
            found[path] = _fitting(known[path], value, f"{self.path}: {path}")
            try:
                known[path].fit(found[path])
            except ConfigError as error:
                raise ConfigError(f"{self.path}: {error}") from None
        return found


def read_config_file(path: str | Path, *, trust: bool = False) -> ConfigFile:
    """Reads a TOML or JSON file; raises ConfigError if it cannot be read.

    A file of values is the user's own. A run's config.json that somebody else wrote may name code only with `trust`.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        data = json.loads(content) if path.suffix == ".json" else tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # of the decoder, too
        kind = "JSON" if path.suffix == ".json" else "TOML"
        other = "Files of JSON end in .json, all others are read as TOML"
        raise ConfigError(f"--config {path} is not {kind}: {error}. {other}; YAML is not read.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path} has no sections: write an object.")
    if path.name == RECORD or "config" in data:
        return ConfigFile(path, complete=_recorded(path, data, trust))
    sections = {each.name for each in fields(TrainConfig) if each.is_section}
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name in sections and not isinstance(value, dict):
            raise ConfigError(f"{path}: {name}={value!r} is a section: write [{name}] and its fields below.")
        is_section = isinstance(value, dict)  # of an unknown name, too
        values |= {f"{name}.{key}": each for key, each in value.items()} if is_section else {name: value}
    return ConfigFile(path, values)


def to_toml(config: TrainConfig, base: TrainConfig) -> str:
    """Returns `config` as TOML; a value that differs from that of `base` has the latter in a comment."""
    data, preset = to_json(config), to_json(base)
    plain = [name for name, value in data.items() if not isinstance(value, dict)]
    lines = [_line(name, data[name], preset) for name in plain]
    for section, values in data.items():
        if section not in plain:
            lines += ["", f"[{section}]"]
            lines += [_line(name, value, preset[section]) for name, value in values.items()]
    return "\n".join(lines) + "\n"


def _recorded(path: Path, data: Mapping[str, Any], trust: bool) -> TrainConfig:
    from echelon.runs.folder import load_record

    config = load_record(path, data, trust=trust)
    if config.algorithm.is_users:
        raise ConfigError(f"{path} is of a user's own policy: start it from the user's program.")
    values = to_json(config)
    values["run"]["dir"] = ""  # a new run has its own folder
    return from_json(values)


def _fitting(described: ConfigField, value: Any, where: str) -> Any:
    """Returns a value of a file with what TOML cannot write restored; the section checks it."""
    hint = unwrapped(described.hint)
    options = typing.get_args(hint) if is_union(hint) else (hint,)
    if value == "none" and types.NoneType in options:
        return None
    if isinstance(value, float) and value.is_integer() and int in map(unwrapped, options):
        return int(value)  # 1e6
    if isinstance(value, str) and typing.get_origin(hint) is dict:
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}={value!r:.200} is not JSON ({error}).") from None
    return value


def _line(name: str, value: Any, base: Mapping[str, Any]) -> str:
    text = f"{name} = {_value(value)}"
    if name in base and base[name] == value:
        return text
    return f"{text}  # preset: {_value(base[name]) if name in base else 'no such field'}"


def _value(value: Any) -> str:
    """Returns `value` as TOML on one line; a dict that has null, which TOML has not, as JSON text."""
    match value:
        case None:
            return '"none"'
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case dict() if _has_null(value):
            return _value(json.dumps(value))
        case dict():
            return f"{{{', '.join(f'{_key(key)} = {_value(each)}' for key, each in value.items())}}}"
    return repr(value)


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else _value(key)


def _has_null(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(map(_has_null, values))
