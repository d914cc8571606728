"""`echelon train PRESET ENV`: short options for common fields, and --section.field for every field."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Collection, Container, Mapping, Sequence
from types import MappingProxyType

from echelon.cli.main import Parser
from echelon.config import TrainConfig
from echelon.config_io import FieldInfo, fields_of, set_fields
from echelon.errors import ConfigError
from echelon.families import FAMILY_OF, OWN, family_of, name_of
from echelon.presets import DEFAULT_ENVS, PRESETS, check_preset, preset

Options = Mapping[str, tuple[str, str]]  # short name: path of the field, metavar
SHORT: Options = {
    "actors": ("actor.num_actors", "N"),
    "min-actors": ("hosts.min_actors", "M"),
    "max-actors": ("actor.num_actors", "N"),
    "envs-per-actor": ("actor.envs", "K"),
    "learners": ("learner.num_learners", "N"),
    "acting": ("acting.mode", "auto|local|central"),
    "engine": ("engine", "inline|local|hosts|ray"),
    "hosts": ("hosts.count", "N"),
    "address": ("hosts.ray_address", "auto|HOST:PORT"),
    "seed": ("seed", "S"),
    "steps": ("stop.steps", "N"),
    "minutes": ("stop.minutes", "M"),
    "episodes": ("stop.episodes", "N"),
    "until-return": ("stop.until_return", "R"),
    "run-dir": ("run.dir", "DIR"),
    "device": ("learner.device", "auto|cpu|cuda"),
    "init-from": ("run.init_from", "RUN|FILE"),
    "env-kwargs": ("env.kwargs", "JSON"),
    "on-env-error": ("env.on_error", "stop|restart"),
    "shm-dir": ("shm_dir", "DIR"),
    "log-interval": ("run.log_interval", "N"),
}
WORKERS_ADDRESS = ("workers.address", "HOST:PORT")  # --address of `echelon learner`
AUTO_RESUME = "--auto-resume"
STOPPED = 128 + signal.SIGTERM  # exit code of a run with --auto-resume that was stopped before its end
RANKS = {  # options that set the number of actors
    "world-size": "one learner and N-1 actors, in place of --actors",
    "single-process": "everything in this process, with one actor: --engine inline --actors 1",
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
    given = [] if place is None else arguments[place + 1 :][:1]
    env = next((word for word in given if not word.startswith("-")), DEFAULT_ENVS.get(shown, "CartPole-v1"))
    infos = fields_of(preset(shown, env))
    parser = Parser(
        prog=prog,
        description=description,
        epilog=_fields_help(
            f"{shown} preset for {env}",
            infos,
            [f"`{prog} {other} --help`" for other in presets if other != shown],
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if len(presets) > 1:
        parser.add_argument("preset", metavar="PRESET", help=", ".join(presets))
    else:  # the command is made for one
        parser.set_defaults(preset=shown)
    own = "; ".join(f"default of {name}: {env}" for name, env in DEFAULT_ENVS.items() if name in presets)
    text = "gymnasium id, module:factory, file.py:factory or envpool:ID"
    parser.add_argument("env", metavar="ENV", nargs="?", help=f"{text} ({own})" if own else text)
    found = {info.path: info.field for info in infos}
    for name, (path, metavar) in options.items():
        default = f" (default {defaults[name]})" if name in defaults else ""
        parser.add_argument(f"--{name}", metavar=metavar, help=found[path].meaning.replace("%", "%%") + default)
    if "actors" in options:
        parser.add_argument("--world-size", metavar="N", help=RANKS["world-size"])
        parser.add_argument("--single-process", action="store_true", help=RANKS["single-process"])
    return parser


def _fields_help(name: str, infos: Sequence[FieldInfo], others: Sequence[str]) -> str:
    known = f"other presets: {', '.join(others)}; " if others else ""
    lines = [f"all fields, with the values of the {name} ({known}some values depend on ENV):"]
    for info in infos:
        option = info.path.replace("_", "-")
        lines.append(f"  --{option} {info.field.type}  (default {info.value}) {info.field.text}")
    return "\n".join(lines)


def parse_config(
    parser: argparse.ArgumentParser, arguments: Sequence[str], options: Options = SHORT, *, observe: bool = False
) -> TrainConfig:
    """Returns the configuration of the preset with the options applied.

    With `observe`, an environment that is not known by its id is created, to see whether it observes images.
    """
    rest, texts = _take_fields(arguments, {*options, *RANKS})
    known = parser.parse_intermixed_args(rest)  # ENV, which may be missing, need not follow PRESET
    short = {path: value for name, (path, _) in options.items() if (value := vars(known)[name.replace("-", "_")])}
    if "actors" in options:
        if known.actors and known.max_actors:
            raise ConfigError("actor.num_actors is set twice, by --actors and by --max-actors. Remove one of them.")
        if known.max_actors and not known.min_actors and "hosts.min_actors" not in texts:
            raise ConfigError(
                "--max-actors needs --min-actors: between them is the number of actors. Or use --actors N."
            )
        short |= _ranks(known, {**short, **texts})
    env = _env_of(parser, known)
    config = preset(known.preset, env, _observed(env, {**short, **texts}) if observe else "")
    for path, value in (("preset", known.preset), ("algorithm.name", config.algorithm.name)):
        if texts.get(path, value) != value:
            other = f"Write `{parser.prog} {texts[path]} {config.env.id}`."
            remedy = other if _has_presets(parser) else f"Remove --{path}."
            raise ConfigError(f"--{path} {texts[path]} does not fit the preset {known.preset}. {remedy}")
    if both := sorted(short.keys() & texts.keys()):
        raise ConfigError(f"{both[0]} is set twice, as --{both[0]} and by its short option. Remove one of them.")
    stray = next((path for path in texts if path.startswith("replay.")), None)
    if stray is not None and config.experience != "replay":
        raise ConfigError(
            f"--{stray} has no effect: {config.preset} uses each trajectory once and has no replay. Remove it, or use "
            "a preset with replay (`echelon train --help`)."
        )
    stray = next((path for path in texts if path.startswith("workers.")), None)
    for_workers = options.get("address") == WORKERS_ADDRESS
    if stray is not None and not for_workers:
        raise ConfigError(f"--{stray} applies only to a learner with workers: use `echelon learner`.")
    fields = {**short, **texts}
    if for_workers:  # workers choose their own actions, and updates belong to their episodes
        for path, value in (("acting.mode", "local"), ("replay.exact", "false")):
            fields.setdefault(path, value)
    if "env.kwargs" in fields:
        given = set_fields(config, {"env.kwargs": fields["env.kwargs"]}).env.kwargs
        fields["env.kwargs"] = json.dumps({**config.env.kwargs, **given})
    if fields.get("hosts.count", "1") != "1" or fields.get("hosts.min_actors", "0") != "0":
        fields.setdefault("engine", "hosts")
    stray = next((path for path in texts if path.startswith("hosts.")), None)
    if stray is not None and fields.get("engine") not in ("hosts", "ray"):
        raise ConfigError(f"--{stray} has no effect: the run has one host. Add --hosts N or --min-actors M.")
    return set_fields(config, fields)


def _observed(env: str, given: Mapping[str, str]) -> str:
    """Returns the family of `env`: by its id, or by what it observes."""
    family = family_of(env)
    if family not in OWN or name_of(env) in FAMILY_OF:
        return family
    from echelon.envs.observed import observed_family

    return observed_family(env, given.get("env.kwargs", "{}"), given.get("env.wrappers", ""))


def _env_of(parser: argparse.ArgumentParser, known: argparse.Namespace) -> str:
    check_preset(known.preset)
    env: str = known.env or DEFAULT_ENVS.get(known.preset, "")
    if not env:
        command = f"{parser.prog} {known.preset}" if _has_presets(parser) else parser.prog
        parser.error(f"the environment is missing: `{command} ENV`, for example CartPole-v1")
    return env


def _has_presets(parser: argparse.ArgumentParser) -> bool:
    """Returns whether the preset is an argument of the command."""
    return parser.get_default("preset") is None


def _ranks(known: argparse.Namespace, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the fields that --world-size and --single-process set; raises ConfigError if `given` has them, too."""
    fields: dict[str, str] = {}
    if known.world_size is not None:
        if not known.world_size.isdecimal() or int(known.world_size) < 2:
            raise ConfigError(
                f"--world-size {known.world_size} must be a whole number of at least 2: {RANKS['world-size']}."
            )
        fields["actor.num_actors"] = str(int(known.world_size) - 1)
    if known.single_process:
        if known.world_size is not None:
            raise ConfigError(f"--single-process and --world-size {known.world_size}: give one of them.")
        fields |= {"engine": "inline", "actor.num_actors": "1"}
    if both := sorted(fields.keys() & given.keys()):
        name = "--single-process" if known.single_process else "--world-size"
        raise ConfigError(f"{both[0]} is set twice, by {name} and by its own option. Remove one of them.")
    return fields


def _take_fields(arguments: Sequence[str], options: Container[str]) -> tuple[list[str], dict[str, str]]:
    """Separates --section.field VALUE and --section.field=VALUE; returns the other arguments, and texts by path."""
    rest: list[str] = []
    texts: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and (option := name.replace("_", "-")) in options:
            rest.append(f"--{option}{equals}{value}")
            continue
        if not word.startswith("--") or name in ("", "help"):
            rest.append(word)
            continue
        if not equals:
            found = next(words, None)
            if found is None or found.startswith("--"):
                raise ConfigError(f"{word} needs a value: {word} VALUE.")
            value = found
        texts[name.replace("-", "_")] = value
    return rest, texts


def start(parser: argparse.ArgumentParser, arguments: Sequence[str], options: Options = SHORT) -> int:
    """Trains as the options say; returns the exit code."""
    parser.add_argument(
        AUTO_RESUME,
        action="store_true",
        help="resume the run in --run-dir if there is one; do nothing if it has reached its end. Exits with "
        f"{STOPPED} if the run is stopped before: for a supervisor that then starts the command again",
    )
    words = [word for word in arguments if word != AUTO_RESUME]
    config = parse_config(parser, words, options, observe=True)
    from echelon.training import train, train_or_resume

    if len(words) == len(arguments):
        train(config)
        return 0
    result = train_or_resume(config)
    return STOPPED if result is not None and result.status == "stopped" else 0


def run(arguments: Sequence[str]) -> int:
    from echelon.cli import seeds

    parser = make_parser("echelon train", "Train a policy. All results are stored in the run folder.", arguments)
    seeds.add_options(parser)
    words, given = seeds.take_options(arguments, ("seeds", "jobs"))
    if "seeds" not in given:
        if "jobs" in given:
            raise ConfigError(f"--jobs {given['jobs']} has no effect: this is one training. Add --seeds 0-4.")
        return start(parser, arguments)
    words, places = seeds.take_options(words, ("run-dir", "run.dir", "seed"))
    if "seed" in places:
        raise ConfigError(f"--seed {places['seed']} and --seeds {given['seeds']}: give one of them.")
    resumes = AUTO_RESUME in words
    config = parse_config(parser, [word for word in words if word != AUTO_RESUME], observe=True)
    return seeds.train_seeds(config, words, {**given, **places}, resumes=resumes)
