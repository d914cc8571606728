"""`echelon learner PRESET ENV`: learn from the episodes that workers bring."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.cli.train import SHORT, make_parser, parse_config

DEFAULT_ADDRESS = "127.0.0.1:4444"
NOT_HERE = ("actors", "envs-per-actor", "acting", "engine")
OPTIONS = {
    "address": ("workers.address", "HOST:PORT", f"where workers come to (default {DEFAULT_ADDRESS})"),
    "epochs": ("stop.epochs", "N", "stop after N episodes that were learned from"),
    "update-steps": ("workers.updates", "N", "updates of every such episode"),
    "batch-size": ("replay.batch", "N", "transitions of every update"),
    "buffer-size": ("replay.capacity", "N", "transitions that are kept"),
    "eval-freq": ("workers.evaluation", "PART", "the part of all episodes that is played greedily, and logged"),
    **{name: option for name, option in SHORT.items() if name not in NOT_HERE},
}


def run(arguments: Sequence[str]) -> int:
    from echelon.training import train

    about = "Learn from the episodes that workers bring (`echelon worker --learner HOST:PORT`)."
    parser = make_parser("echelon learner", about, arguments, OPTIONS)
    train(parse_config(parser, with_address(arguments), OPTIONS))
    return 0


def with_address(arguments: Sequence[str]) -> list[str]:
    """`arguments` with an address among them, written in full."""
    words = [word for argument in arguments for word in _parted(argument)]
    if not any(word.startswith("--workers.address") or word == "--address" for word in words):
        words += ["--address", DEFAULT_ADDRESS]
    for place, word in enumerate(words[:-1]):
        if word == "--address" and "://" not in words[place + 1]:
            words[place + 1] = f"tcp://{words[place + 1]}"
    return words


def _parted(word: str) -> list[str]:
    return ["--address", word.removeprefix("--address=")] if word.startswith("--address=") else [word]
