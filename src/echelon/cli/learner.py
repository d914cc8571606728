"""`echelon learner PRESET ENV`: learns from the episodes of workers."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.cli.file_options import config_file_of
from echelon.cli.train import SHORT, WORKERS_ADDRESS, make_parser, start
from echelon.errors import ConfigError
from echelon.presets import REPLAY_PRESETS

DEFAULT_ADDRESS = "127.0.0.1:4444"
NOT_HERE = ("actors", "min-actors", "max-actors", "envs-per-actor", "learners", "acting", "engine", "hosts", "address")
OPTIONS = {
    "address": WORKERS_ADDRESS,
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
    refuse_actors(arguments)
    return start(parser, with_address(arguments), OPTIONS)


def refuse_actors(arguments: Sequence[str]) -> None:
    """Raises ConfigError for options of actors and of several learners."""
    for word in arguments:
        name = word.partition("=")[0]
        if name in ("--actors", "--min-actors", "--max-actors", "--envs-per-actor") or name.startswith("--actor."):
            raise ConfigError(f"{name}: a learner has no actors; workers send the experience. Remove this option.")
        if name.replace("_", "-") in ("--learners", "--learner.num-learners"):
            raise ConfigError(f"{name}: only one learner can receive workers' episodes. Remove this option.")


def with_address(arguments: Sequence[str]) -> list[str]:
    """Returns `arguments` with a complete --address, by default DEFAULT_ADDRESS."""
    words = [word for argument in arguments for word in _split(argument)]
    named = any(word.startswith("--workers.address") or word == "--address" for word in words)
    if not named and not _file_has_address(words):
        words += ["--address", DEFAULT_ADDRESS]
    for place, word in enumerate(words[:-1]):
        if word == "--address":
            words[place + 1] = complete_address(words[place + 1])
    return words


def _file_has_address(words: Sequence[str]) -> bool:
    """Returns whether the file of --config says where workers connect."""
    file = config_file_of(words)
    if file is None:
        return False
    return bool(file.complete.workers.address if file.complete is not None else file.values.get("workers.address"))


def _split(word: str) -> list[str]:
    return ["--address", word.removeprefix("--address=")] if word.startswith("--address=") else [word]


def complete_address(address: str) -> str:
    """Returns the address that `--address` names, with its scheme; raises ConfigError if it is none."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(
            f"--address {address} is not an address. Write HOST:PORT, such as {DEFAULT_ADDRESS}, or 0.0.0.0:4444 for "
            "workers on other hosts; port 0 takes any free port."
        )
    return f"tcp://{host}:{port}"
