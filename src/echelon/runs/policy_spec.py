"""What builds the network of a trained policy, besides its weights: the spaces, the network and the algorithm.

A run folder has it in `config.json`; a weights file has it in its metadata, so that the file can be used alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon import config_io
from echelon.config import AlgorithmConfig, NetworkConfig, TrainConfig
from echelon.errors import ConfigError
from echelon.schema import Spaces
from echelon.trust import check_names, has_mark, mark, run_folder

FORMAT = 1
KEY = "policy"  # of a weights file's metadata
SECTIONS = ("network", "algorithm")
# What reading spaces raises that `spaces_to_json` did not write.
UNREADABLE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, AssertionError, MemoryError)


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """The spaces of the environment, and the sections of the configuration that the network is built from."""

    spaces: Spaces
    network: NetworkConfig
    algorithm: AlgorithmConfig

    @classmethod
    def of(cls, config: TrainConfig, spaces: Spaces) -> PolicySpec:
        return cls(spaces, config.network, config.algorithm)

    def metadata(self) -> dict[str, str]:
        """Returns the metadata of a weights file, with this user's mark; empty for a user's own policy."""
        if self.algorithm.is_users:
            return {}
        whole = config_io.to_json(TrainConfig(network=self.network, algorithm=self.algorithm))
        config = {name: whole[name] for name in SECTIONS}
        record = {"format": FORMAT, "spaces": spaces_to_json(self.spaces), "config": config, "mark": mark(config)}
        return {KEY: json.dumps(record, allow_nan=False)}

    @classmethod
    def from_metadata(cls, text: str, file: Path, *, trust: bool) -> PolicySpec:
        """Returns the spec that `metadata` wrote; raises ConfigError if it names code that may not be imported."""
        try:
            record = json.loads(text)
            if record["format"] != FORMAT:
                raise ConfigError(
                    f"{file} has metadata of format {record['format']!r:.20}; this Echelon reads format {FORMAT}."
                )
            config = config_io.from_json({name: record["config"][name] for name in SECTIONS})
            spaces = spaces_from_json(record["spaces"])
        except (*UNREADABLE, RecursionError) as error:
            raise ConfigError(f"the metadata of {file} is damaged: {error!r:.200}. Give an intact file.") from error
        if not trust and not has_mark(record["config"], record.get("mark")):
            check_names(config, run_folder(file), env=False)
        return cls.of(config, spaces)


def spaces_to_json(spaces: Spaces) -> dict[str, Any]:
    """Returns `spaces` as strict JSON: infinite bounds become text, which `spaces_from_json` reads."""
    data: dict[str, Any] = _strict(spaces.to_json())
    return data


def spaces_from_json(data: Mapping[str, Any]) -> Spaces:
    """Returns the spaces that `spaces_to_json` wrote; raises one of UNREADABLE on anything else."""
    return Spaces.from_json(data)  # numpy reads numbers from text


def _strict(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case list():
            return [_strict(item) for item in value]
        case dict():
            return {key: _strict(item) for key, item in value.items()}
    return value
