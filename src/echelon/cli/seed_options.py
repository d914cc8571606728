"""The options of `echelon train` for several seeds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from echelon.errors import ConfigError

OPTIONS = {
    "seeds": ("LIST", "train once per seed: 0-4,7 (--run-dir is then the folder of all runs, DIR/seed-S that of each)"),
    "jobs": ("N", "with --seeds: trainings at a time, each of which plans for 1/N of the cores (default 1)"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    for name, (metavar, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", metavar=metavar, help=text)


def take_options(arguments: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separates the options `names` from the other arguments; returns the others, and the values by name."""
    rest: list[str] = []
    values: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        name = option.removeprefix("--").replace("_", "-")
        if not word.startswith("--") or name not in names:
            rest.append(word)
            continue
        found = value if equals else next(words, "")
        if not found or found.startswith("--"):
            raise ConfigError(f"{option} needs a value: {option} VALUE.")
        values[name] = found
    return rest, values
