"""`echelon train PRESET ENV`: short options for common fields, and --section.field for every field."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Container, Mapping, Sequence, Set
from types import MappingProxyType
from typing import NamedTuple

from echelon.cli.callback_options import add_callback, check_callbacks, take_callbacks
from echelon.cli.file_options import FILE_OPTIONS, refuse_strays, take_file
from echelon.cli.main import Parser
from echelon.cli.seed_options import add_options, take_options
from echelon.config import RENAMED, TrainConfig
from echelon.config_files import ConfigFile, to_toml
from echelon.config_io import FieldInfo, fields_of, set_fields
from echelon.errors import ConfigError
from echelon.families import FAMILY_OF, OWN, family_of, name_of
from echelon.fields import option_text
from echelon.names import short_name, text_of
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
FOREIGN = re.compile(r"-v\d|[:/.]")  # in the name of an environment, and never in that of a preset
WORKERS_ADDRESS = ("workers.address", "HOST:PORT")  # --address of `echelon learner`
AUTO_RESUME = "--auto-resume"
FLAGS = ("-h", "--help", "--dry-run", "--trust", "--single-process", AUTO_RESUME)  # options without a value
MEANINGS = {"max-actors": "with --min-actors: most actors that run at a time"}  # where a field has two options
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
    values: Mapping[str, str] = MappingProxyType({}),
) -> argparse.ArgumentParser:
    """Returns a parser with the positional arguments and `options` of a training; its help shows a given preset.

    `defaults` are shown for options whose default differs from that of their field; `values` are fields that the
    command sets in place of the preset.
    """
    words = positional(arguments)
    place = next((place for place, word in enumerate(words) if word in presets), None)
    shown = next(iter(presets)) if place is None else words[place]
    given = [] if place is None else words[place + 1 :][:1]
    env = next(iter(given), DEFAULT_ENVS.get(shown, "CartPole-v1"))
    wants_help = given and {"-h", "--help"} & {*arguments}
    infos = fields_of(set_fields(preset(shown, env, _observed(env, {}, None) if wants_help else ""), values))
    parser = Parser(
        prog=prog,
        description=description,
        epilog=_fields_help(f"{shown} preset for {env}{' and of this command' if values else ''}", infos)
        if place is not None or len(presets) == 1
        else f"`{prog} PRESET [ENV] --help` also lists every field, --section.field, with its value for the preset.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if len(presets) > 1:
        parser.add_argument("preset", metavar="PRESET", nargs="?", help=", ".join(presets))
    else:  # the command is made for one
        parser.set_defaults(preset=shown)
    own = "; ".join(f"default of {name}: {env}" for name, env in DEFAULT_ENVS.items() if name in presets)
    text = "gymnasium id, module:factory, file.py:factory or envpool:ID"
    parser.add_argument("env", metavar="ENV", nargs="?", help=f"{text} ({own})" if own else text)
    found = {info.path: info.field for info in infos}
    for name, (path, metavar) in options.items():
        default = f" (default {defaults[name]})" if name in defaults else ""
        meaning = MEANINGS.get(name, found[path].meaning)
        parser.add_argument(f"--{name}", metavar=metavar, help=meaning.replace("%", "%%") + default)
    for name, more in FILE_OPTIONS.items():
        parser.add_argument(f"--{name}", **more)
    if "actors" in options:
        parser.add_argument("--world-size", metavar="N", help=RANKS["world-size"])
        parser.add_argument("--single-process", action="store_true", help=RANKS["single-process"])
    return parser


def positional(arguments: Sequence[str]) -> list[str]:
    """Returns the words of `arguments` that are neither options nor their values."""
    found, is_value = [], False
    for word in arguments:
        if word.startswith("-"):
            is_value = "=" not in word and word not in FLAGS
            continue
        if not is_value:
            found.append(word)
        is_value = False
    return found


def _fields_help(name: str, infos: Sequence[FieldInfo]) -> str:
    lines = [f"all fields, with the values of the {name} (some values depend on ENV):"]
    for info in infos:
        option = info.path.replace("_", "-")
        lines.append(f"  --{option} {info.field.type}  (default {option_text(info.value)}) {info.field.text}")
    return "\n".join(lines)


def parse_config(
    parser: argparse.ArgumentParser, arguments: Sequence[str], options: Options = SHORT, *, observe: bool = False
) -> TrainConfig:
    """Returns the configuration of the preset with the options applied.

    With `observe`, an environment that is not known by its id is created, to see whether it observes images.
    """
    return read_options(parser, arguments, options, observe=observe).config


class Parsed(NamedTuple):
    """What a command line asks for."""

    config: TrainConfig
    base: TrainConfig  # the preset's values for the environment
    given: Set[str]  # fields and sections that the command or its file names
    dry_run: bool

    def print_toml(self, prog: str) -> None:
        """Prints the configuration, for `--dry-run`."""
        name = f"{prog} {self.config.preset} {short_name(self.config.env.id)}"
        print(f"# {name}: `{prog} --config FILE` runs it. Marked values differ from the preset.")
        print(to_toml(self.config, self.base), end="", flush=True)


def read_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str], options: Options = SHORT, *, observe: bool = False
) -> Parsed:
    """Returns what `arguments` ask for; see `parse_config`."""
    rest, texts = _take_fields(arguments, {*options, *RANKS, *FILE_OPTIONS})
    known = parser.parse_intermixed_args(rest)  # ENV, which may be missing, need not follow PRESET
    file = take_file(parser, known)
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
    family = _observed(env, {**short, **texts}, file) if observe else ""
    base = config = preset(known.preset, env, family)
    values = file.changes(base) if file is not None else {}
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
    if file is not None and file.complete is None:
        refuse_strays(file, base, values, for_workers)
    if stray is not None and not for_workers:
        raise ConfigError(f"--{stray} applies only to a learner with workers: use `echelon learner`.")
    fields = {**short, **texts}
    given = {*(RENAMED[path].path if path in RENAMED else path for path in fields), *values}
    network = fields.get("network.name", values.get("network.name", config.network.name))
    stray = next((path for path in texts if path.startswith("network.") and path != "network.name"), None)
    if stray is not None and network != "auto":
        raise ConfigError(f"--{stray} has no effect: the network is {text_of(network)}. Remove one of them.")
    if for_workers:  # workers choose their own actions, and updates belong to their episodes
        for path, value in (("acting.mode", "local"), ("replay.exact", "false")):
            if path not in values:
                fields.setdefault(path, value)
    if "env.kwargs" in fields:
        added = set_fields(config, {"env.kwargs": fields["env.kwargs"]}).env.kwargs
        before = file.complete.env if file is not None and file.complete is not None else config.env
        fields["env.kwargs"] = json.dumps({**values.get("env.kwargs", before.kwargs), **added})
    alone = {"hosts.count": "1", "hosts.min_actors": "0"}
    asked = any(fields.get(path, number) != number for path, number in alone.items())
    filed = any(str(values.get(path, number)) != number for path, number in alone.items())
    if (asked or (filed and "engine" not in values)) and values.get("engine") not in ("hosts", "ray"):
        fields.setdefault("engine", "hosts")
    stray = next((path for path in texts if path.startswith("hosts.")), None)
    if stray is not None and fields.get("engine", values.get("engine")) not in ("hosts", "ray"):
        raise ConfigError(f"--{stray} has no effect: the run has one host. Add --hosts N or --min-actors M.")
    if file is not None and file.complete is not None:
        config, values = file.complete, {}
        if config.has_workers and not for_workers:
            raise ConfigError(f"{file.path} is of a learner with workers: use `echelon learner`.")
    return Parsed(set_fields(config, fields, values), base, given, known.dry_run)


def _observed(env: str, given: Mapping[str, str], file: ConfigFile | None) -> str:
    """Returns the family of `env`: by its id, or by what it observes."""
    family = family_of(env)
    if family not in OWN or name_of(env) in FAMILY_OF:
        return family
    from echelon.envs.observed import observed_family

    texts = {path: text for path, text in given.items() if path in ("env.kwargs", "env.wrappers")}
    start = file.complete if file is not None and file.complete is not None else TrainConfig()
    values = file.values if file is not None else {}
    settings = {path: values[path] for path in ("env.kwargs", "env.wrappers") if path in values}
    made = set_fields(start, texts, settings).env
    return observed_family(env, made.kwargs, [str(name) for name in made.wrappers])


def check_order(parser: argparse.ArgumentParser, known: argparse.Namespace) -> None:
    """Raises ConfigError unless the first argument is a preset."""
    if known.preset not in PRESETS and (known.env in PRESETS or (known.env is None and FOREIGN.search(known.preset))):
        raise ConfigError(
            f"there is no preset {known.preset!r}. PRESET comes before ENV: `{parser.prog} {known.env or 'ppo'} "
            f"{known.preset}`."
        )
    check_preset(known.preset)


def _env_of(parser: argparse.ArgumentParser, known: argparse.Namespace) -> str:
    check_order(parser, known)
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
        help="resume the run in --run-dir, of the same preset and environment, if there is one; do nothing if it has "
        "reached its end. The exit code is 0 only at the end: for a supervisor that otherwise starts the command again",
    )
    add_callback(parser)
    words, callbacks = take_callbacks(arguments)
    resumes = AUTO_RESUME in words
    parsed = read_options(parser, [word for word in words if word != AUTO_RESUME], options, observe=True)
    if parsed.dry_run:
        check_callbacks(callbacks)
        parsed.print_toml(parser.prog)
        return 0
    config = parsed.config
    from echelon.training import train, train_or_resume

    if not resumes:
        return train(config, callbacks=callbacks).exit_code
    result = train_or_resume(config, given=parsed.given, callbacks=callbacks)
    return 0 if result is None else result.exit_code


def run(arguments: Sequence[str]) -> int:
    parser = make_parser("echelon train", "Train a policy. All results are stored in the run folder.", arguments)
    add_options(parser)
    words, given = take_options(arguments, ("seeds", "jobs"))
    if "seeds" not in given:
        if "jobs" in given:
            raise ConfigError(f"--jobs {given['jobs']} has no effect: this is one training. Add --seeds 0-4.")
        return start(parser, arguments)
    words, places = take_options(words, ("run-dir", "run.dir", "seed"))
    if "seed" in places:
        raise ConfigError(f"--seed {places['seed']} and --seeds {given['seeds']}: give one of them.")
    resumes = AUTO_RESUME in words
    plain, callbacks = take_callbacks(words)
    parsed = read_options(parser, [word for word in plain if word != AUTO_RESUME], observe=True)
    check_callbacks(callbacks)  # each training makes its own
    if parsed.dry_run:
        parsed.print_toml(parser.prog)
        return 0
    from echelon.cli import seeds

    return seeds.train_seeds(parsed.config, words, {**given, **places}, callbacks, resumes=resumes)
