"""`echelon kube render`: the Kubernetes objects of a training with its workers, as YAML."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import structs

from echelon.cli import learner
from echelon.cli.callback_options import take_callbacks
from echelon.cli.main import Parser
from echelon.cli.train import AUTO_RESUME, make_parser, parse_config
from echelon.errors import ConfigError
from echelon.fields import ConfigField, fields, unwrapped
from echelon.kube import kuberay, plain
from echelon.kube.options import COMMANDS, KubeOptions, read_options
from echelon.kube.pods import Manifest
from echelon.kube.yaml_text import to_yaml
from echelon.presets import REPLAY_PRESETS
from echelon.roles.plan.start import check_stop

FLAVOURS: dict[str, ModuleType] = {"plain": plain, "kuberay": kuberay}
# Options of the training that follow from the manifests.
RENDERED = ("--run-dir", "--run.dir", "--shm-dir", "--engine", "--hosts", "--address", "--workers.address", AUTO_RESUME)
USAGE = "echelon kube render --flavour plain|kuberay --image IMAGE [options] -- PRESET ENV [options of the training]"


def run(arguments: Sequence[str]) -> int:
    words = list(arguments)
    parser = Parser(
        prog="echelon kube",
        usage=USAGE,
        description="Render the Kubernetes objects of a training: its learner, its workers, and what they need. They "
        "are written to standard output, or to a folder with one file for each object; `kubectl apply -f` takes both. "
        "The same options give the same bytes. See docs/kubernetes.md.",
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=["render"], help="render: write the objects as YAML")
    parser.add_argument("-o", "--output", default="", metavar="DIR", help="folder to write to (default: stdout)")
    parser.add_argument("--config", default="", metavar="FILE", help="TOML file with these options, without their --")
    for option in fields(KubeOptions):
        _add(parser, option)
    place = words.index("--") if "--" in words else len(words)
    known = vars(parser.parse_args(words[:place]))
    if place < len(words):
        known["train"] = tuple(words[place + 1 :])
    output, path = known.pop("output"), known.pop("config")
    del known["action"]
    options = read_options(path, {name: value for name, value in known.items() if value is not None})
    _check_training(options)
    _write(FLAVOURS[options.flavour].render(options), output)
    return 0


def _add(parser: Parser, option: ConfigField) -> None:
    """Adds the flag of an option; the option itself checks its value."""
    kind: Any = unwrapped(option.hint)
    more: dict[str, Any] = {"metavar": option.name.rpartition("_")[2].upper()}
    text = option.text
    if option.name in COMMANDS:
        more = {"type": lambda text: tuple(shlex.split(text)), "metavar": "WORDS"}
    elif kind is int:
        more = {"type": int, "metavar": "N"}
    elif kind == dict[str, str]:
        more = {"action": _Label, "metavar": "KEY=VALUE"}
        text += "; may be repeated"
    elif option.type.count("|"):
        more["metavar"] = option.type
    value = next(field.default for field in structs.fields(KubeOptions) if field.name == option.name)
    shown = f" (default {value})" if isinstance(value, str | int) and value != "" else ""
    parser.add_argument(f"--{option.name.replace('_', '-')}", help=text.replace("%", "%%") + shown, **more)


class _Label(argparse.Action):
    """Collects KEY=VALUE."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        key, equals, value = values.partition("=")
        if not equals:
            raise ConfigError(f"{option_string} {values} has no value: write KEY=VALUE, as in nodetype=gpu.")
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), key: value})


def _check_training(options: KubeOptions) -> None:
    """Raises ConfigError unless the training can be parsed, as the learner will do, and has an end."""
    words, _ = take_callbacks(options.train)
    if not words:
        return
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name in RENDERED or name.startswith("--hosts."):
            raise ConfigError(f"{name} follows from the options of `echelon kube render`. Remove it from the training.")
    if options.flavour == "plain" and options.workers_kind == "worker":
        if words[0] not in REPLAY_PRESETS:
            raise ConfigError(
                f"`echelon worker` works for {', '.join(REPLAY_PRESETS)}, not for {words[0]}. Add --workers-kind host."
            )
        parser = make_parser("echelon learner", "", words, learner.OPTIONS, REPLAY_PRESETS)
        learner.refuse_actors(words)
        config = parse_config(parser, learner.with_address(words), learner.OPTIONS)
    else:
        hosts = plain.hosts_options(options) if options.flavour == "plain" else kuberay.RAY_OPTIONS
        config = parse_config(make_parser("echelon train", "", words), [*words, *hosts])
    check_stop(config)


def _write(manifests: list[Manifest], output: str) -> None:
    if not output:
        print(to_yaml(manifests), end="")
        return
    folder = Path(output)
    files = {f"{one['kind']}-{one['metadata']['name']}.yaml".lower(): to_yaml([one]) for one in manifests}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if others := sorted(path.name for path in folder.glob("*.y*ml") if path.name not in files):
            raise ConfigError(
                f"{folder} has {others[0]}, which would be applied, too. Remove it, or name another folder."
            )
        for name, text in files.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"-o {folder} cannot be written: {error}.") from error
