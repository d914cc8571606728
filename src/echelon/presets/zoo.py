"""The zoo: values that suit an environment or a family of environments, and the returns that they reached.

zoo.toml has one row per preset and environment or family. results.json has what `benchmarks/zoo.py` measured.
"""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from echelon.config import TrainConfig, replace
from echelon.errors import ConfigError
from echelon.families import FAMILIES, family_of, name_of


@dataclass(frozen=True, slots=True)
class ZooRow:
    """The values of one preset for environments or families."""

    preset: str
    targets: tuple[str, ...]  # names of environments, without versions, or families
    values: Mapping[str, Any]  # by dotted path


@dataclass(frozen=True, slots=True)
class ZooResult:
    """Greedy returns that a preset reached in an environment, one per seed."""

    preset: str
    env: str
    steps: int
    seeds: tuple[int, ...]
    returns: tuple[float, ...]


def tuned(config: TrainConfig, preset: str, family: str = "") -> TrainConfig:
    """Returns `config` with the values of the rows that apply to its environment."""
    for row in rows_for(preset, config.env.id, family):
        config = replace(config, **row.values)
    return config


def rows_for(preset: str, env: Any, family: str = "") -> list[ZooRow]:
    """Returns the rows of `preset` for `env`, those of its family first; `family` is the one of an unknown `env`."""
    if family not in ("", *FAMILIES):
        raise ConfigError(f"there is no family {family!r} of environments. Families: {', '.join(FAMILIES)}.")
    wanted = (family or family_of(env), name_of(env))
    return [row for target in wanted for row in all_rows() if row.preset == preset and target in row.targets]


@functools.cache
def all_rows() -> tuple[ZooRow, ...]:
    """Returns all rows, in the order of zoo.toml."""
    found = []
    for preset, rows in tomllib.loads(_text("zoo.toml")).items():
        for row in rows:
            targets = row.pop("for")
            sections = {f"{section}.{field}": _value(value) for section in row for field, value in row[section].items()}
            found.append(ZooRow(preset, (targets,) if isinstance(targets, str) else tuple(targets), sections))
    return tuple(found)


@functools.cache
def all_results() -> tuple[ZooResult, ...]:
    """Returns all results, in the order of results.json."""
    rows = json.loads(_text("results.json"))
    return tuple(
        ZooResult(row["preset"], row["env"], row["steps"], tuple(row["seeds"]), tuple(row["returns"])) for row in rows
    )


def _text(name: str) -> str:
    return files("echelon.presets").joinpath(name).read_text()


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
