"""--config, --dry-run and --trust of the commands that train."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from echelon.cli.main import Parser
from echelon.config import TrainConfig
from echelon.config_files import ConfigFile, read_config_file
from echelon.config_io import fields_of
from echelon.errors import ConfigError
from echelon.presets import PRESETS

FILE_OPTIONS: dict[str, dict[str, Any]] = {
    "config": {
        "metavar": "FILE",
        "default": "",
        "help": "TOML or JSON file with values in place of the preset's, or a run's config.json; options override it",
    },
    "dry-run": {"action": "store_true", "help": "print the configuration as TOML, and start nothing"},
    "trust": {
        "action": "store_true",
        "help": "with --config RUN/config.json: import and run the code that it names, although somebody else wrote it",
    },
}


def config_file_of(words: Sequence[str]) -> ConfigFile | None:
    """Returns the file of --config among the words of a command."""
    parser = Parser(add_help=False, allow_abbrev=False)
    for name in ("config", "trust"):
        parser.add_argument(f"--{name}", **FILE_OPTIONS[name])
    known, _ = parser.parse_known_args(list(words))
    return read_config_file(known.config, trust=known.trust) if known.config else None


def take_file(parser: argparse.ArgumentParser, known: argparse.Namespace) -> ConfigFile | None:
    """Returns the file of --config and sets PRESET and ENV from it; raises ConfigError if the command has others."""
    if not known.config:
        if known.preset is None:
            parser.error("the following arguments are required: PRESET")
        return None
    file = read_config_file(known.config, trust=known.trust)
    if file.preset and known.env is None and known.preset not in (None, *PRESETS):
        known.preset, known.env = None, known.preset  # the only argument is ENV
    for name, found in (("preset", file.preset), ("env", file.env)):
        given = getattr(known, name)
        if given and found and given != found:
            field = "env.id" if name == "env" else name
            raise ConfigError(f"--config {file.path} has {field}={found!r}, the command {given!r}. Remove one of them.")
        setattr(known, name, given or found or None)
    if known.preset is None:
        parser.error(f'{file.path} names no preset: add `preset = "ppo"` to it, or PRESET to the command')
    return file


def refuse_strays(file: ConfigFile, base: TrainConfig, values: Mapping[str, Any], for_workers: bool) -> None:
    """Raises ConfigError for a value of the file that differs from the preset's and has no effect."""
    preset_values = {info.path: info.value for info in fields_of(base)}
    for path, value in values.items():
        section = path.partition(".")[0]
        why = ""
        if section == "replay" and base.experience != "replay":
            why = f"{base.preset} uses each trajectory once and has no replay"
        elif section == "workers" and not for_workers:
            why = "it applies only to a learner with workers (`echelon learner`)"
        elif section == "actor" and for_workers:
            why = "a learner has no actors; workers send the experience"
        if why and value != preset_values[path]:
            raise ConfigError(f"{file.path}: {path}={value!r} has no effect: {why}. Remove it.")
