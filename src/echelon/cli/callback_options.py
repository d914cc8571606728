"""The option of `echelon train` and `echelon resume` for callbacks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from echelon.cli.main import Parser


def add_callback(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--callback",
        action="append",
        default=[],
        metavar="NAME",
        help="object whose methods are called during the run, module:factory or file.py:Class(size=3); repeatable. "
        "echelon.callbacks has Wandb(project='x'), Mlflow(experiment='x') and Prometheus(port=0)",
    )


def take_callbacks(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates --callback NAME, which may be repeated, from the other arguments."""
    parser = Parser(add_help=False, allow_abbrev=False)
    add_callback(parser)
    known, rest = parser.parse_known_args(list(arguments))
    return rest, known.callback


def check_callbacks(names: Sequence[str]) -> None:
    """Raises ConfigError if a callback cannot be made."""
    from echelon.callbacks.calls import CallbackList

    CallbackList(names)
