"""`echelon learner PRESET ENV`: learns from the episodes of workers."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.cli.train import SHORT, make_parser, parse_config
from echelon.errors import ConfigError
from echelon.presets import REPLAY_PRESETS

DEFAULT_ADDRESS = "127.0.0.1:4444"
NOT_HERE = ("actors", "envs-per-actor", "learners", "acting", "engine", "hosts")
OPTIONS = {
    "address": ("workers.address", "HOST:PORT"),
    "episodes": ("stop.episodes", "N"),
    "update-steps": ("workers.updates", "N"),
    "batch-size": ("replay.batch", "N"),
    "buffer-size": ("replay.capacity", "N"),
    "eval-freq": ("workers.evaluation", "PART"),
    **{name: option for name, option in SHORT.items() if name not in NOT_HERE},
}


def run(arguments: Sequence[str]) -> int:
    about = "Learn from the episodes of workers (`echelon worker --learner HOST:PORT`)."
    parser = make_parser("echelon learner", about, arguments, OPTIONS, REPLAY_PRESETS, {"address": DEFAULT_ADDRESS})
    _refuse_actors(arguments)
    config = parse_config(parser, with_address(arguments), OPTIONS)
    from echelon.training import train

    train(config)
    return 0


def _refuse_actors(arguments: Sequence[str]) -> None:
    for word in arguments:
        name = word.partition("=")[0]
        if name in ("--actors", "--envs-per-actor") or name.startswith("--actor."):
            raise ConfigError(f"{name}: a learner has no actors; workers send the experience. Remove this option.")
        if name.replace("_", "-") in ("--learners", "--learner.num-learners"):
            raise ConfigError(f"{name}: only one learner can receive workers' episodes. Remove this option.")


def with_address(arguments: Sequence[str]) -> list[str]:
    """Returns `arguments` with a complete --address, by default DEFAULT_ADDRESS."""
    words = [word for argument in arguments for word in _split(argument)]
    if not any(word.startswith("--workers.address") or word == "--address" for word in words):
        words += ["--address", DEFAULT_ADDRESS]
    for place, word in enumerate(words[:-1]):
        if word == "--address":
            words[place + 1] = _complete(words[place + 1])
    return words


def _split(word: str) -> list[str]:
    return ["--address", word.removeprefix("--address=")] if word.startswith("--address=") else [word]


def _complete(address: str) -> str:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(
            f"--address {address} is not an address. Write HOST:PORT, such as {DEFAULT_ADDRESS}, or 0.0.0.0:4444 for "
            "workers on other hosts; port 0 takes any free port."
        )
    return f"tcp://{host}:{port}"
