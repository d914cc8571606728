"""`echelon train PRESET ENV`: short options for common fields, and --section.field for every field."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Container, Mapping, Sequence
from types import MappingProxyType

from echelon.cli.main import Parser
from echelon.config import TrainConfig
from echelon.config_io import FieldInfo, fields_of, set_fields
from echelon.errors import ConfigError
from echelon.presets import PRESETS, preset

Options = Mapping[str, tuple[str, str]]  # short name: path of the field, metavar
SHORT: Options = {
    "actors": ("actor.num_actors", "N"),
    "envs-per-actor": ("actor.envs", "K"),
    "learners": ("learner.num_learners", "N"),
    "acting": ("acting.mode", "auto|local|central"),
    "engine": ("engine", "inline|local|hosts"),
    "hosts": ("hosts.count", "N"),
    "seed": ("seed", "S"),
    "steps": ("stop.steps", "N"),
    "minutes": ("stop.minutes", "M"),
    "until-return": ("stop.until_return", "R"),
    "run-dir": ("run.dir", "DIR"),
    "device": ("learner.device", "auto|cpu|cuda"),
    "init-from": ("run.init_from", "RUN|FILE"),
    "env-kwargs": ("env.kwargs", "JSON"),
    "on-env-error": ("env.on_error", "stop|restart"),
    "shm-dir": ("shm_dir", "DIR"),
}


def make_parser(
    prog: str,
    description: str,
    arguments: Sequence[str] = (),
    options: Options = SHORT,
    presets: Collection[str] = tuple(PRESETS),
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> argparse.ArgumentParser:
    """Returns a parser with the positional arguments and `options` of a training; its help shows the given preset.

    `defaults` are shown for options whose default differs from that of their field.
    """
    place = next((place for place, word in enumerate(arguments) if word in presets), None)
    shown = next(iter(presets)) if place is None else arguments[place]
    env = (
        next((word for word in arguments[place + 1 :][:1] if not word.startswith("-")), "") if place is not None else ""
    )
    infos = fields_of(preset(shown, env or "CartPole-v1"))
    parser = Parser(
        prog=prog,
        description=description,
        epilog=_fields_help(
            f"{shown} preset for {env or 'CartPole-v1'}",
            infos,
            [f"`{prog} {other} --help`" for other in presets if other != shown],
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("preset", metavar="PRESET", help=", ".join(presets))
    parser.add_argument("env", metavar="ENV", help="gymnasium id, module:factory, file.py:factory or envpool:ID")
    found = {info.path: info.field for info in infos}
    for name, (path, metavar) in options.items():
        default = f" (default {defaults[name]})" if name in defaults else ""
        parser.add_argument(f"--{name}", metavar=metavar, help=found[path].meaning.replace("%", "%%") + default)
    return parser


def _fields_help(name: str, infos: Sequence[FieldInfo], others: Sequence[str]) -> str:
    lines = [
        f"all fields, with the values of the {name} (other presets: {', '.join(others)}; some values depend on ENV):"
    ]
    for info in infos:
        option = info.path.replace("_", "-")
        lines.append(f"  --{option} {info.field.type}  (default {info.value}) {info.field.text}")
    return "\n".join(lines)


def parse_config(parser: argparse.ArgumentParser, arguments: Sequence[str], options: Options = SHORT) -> TrainConfig:
    """Returns the configuration of the preset with the options applied."""
    rest, texts = _take_fields(arguments, options)
    known = parser.parse_args(rest)
    short = {path: value for name, (path, _) in options.items() if (value := vars(known)[name.replace("-", "_")])}
    config = preset(known.preset, known.env)
    for path, value in (("preset", known.preset), ("algorithm.name", config.algorithm.name)):
        if texts.get(path, value) != value:
            raise ConfigError(
                f"--{path} {texts[path]} does not fit the preset {known.preset}, the first argument. Write "
                f"`{parser.prog} {texts[path]} {known.env}`."
            )
    if both := sorted(short.keys() & texts.keys()):
        raise ConfigError(f"{both[0]} is set twice, as --{both[0]} and by its short option. Remove one of them.")
    stray = next((path for path in texts if path.startswith("replay.")), None)
    if stray is not None and config.experience != "replay":
        raise ConfigError(
            f"--{stray} has no effect: {config.preset} uses each trajectory once and has no replay. Remove it, or use "
            "a preset with replay (`echelon train --help`)."
        )
    stray = next((path for path in texts if path.startswith("workers.")), None)
    if stray is not None and "address" not in options:
        raise ConfigError(f"--{stray} applies only to a learner with workers: use `echelon learner`.")
    fields = {**short, **texts}
    if fields.get("hosts.count", "1") != "1":
        fields.setdefault("engine", "hosts")
    stray = next((path for path in texts if path.startswith("hosts.")), None)
    if stray is not None and fields.get("engine") != "hosts":
        raise ConfigError(f"--{stray} has no effect: the run has one host. Add --hosts N.")
    return set_fields(config, fields)


def _take_fields(arguments: Sequence[str], options: Container[str]) -> tuple[list[str], dict[str, str]]:
    """Separates --section.field VALUE and --section.field=VALUE; returns the other arguments, and texts by path."""
    rest: list[str] = []
    texts: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name in options or name in ("", "help"):
            rest.append(word)
            continue
        if not equals:
            found = next(words, None)
            if found is None or found.startswith("--"):
                raise ConfigError(f"{word} needs a value: {word} VALUE.")
            value = found
        texts[name.replace("-", "_")] = value
    return rest, texts


def run(arguments: Sequence[str]) -> int:
    parser = make_parser("echelon train", "Train a policy. All results are stored in the run folder.", arguments)
    config = parse_config(parser, arguments)
    from echelon.training import train

    train(config)
    return 0
