"""`echelon presets [PRESET] [ENV]`: the presets, their values for an environment, and the returns that they reached."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from echelon.cli.main import Parser
from echelon.cli.train import check_order
from echelon.config_io import fields_of
from echelon.errors import ConfigError
from echelon.families import FAMILIES, FAMILY_OF, family_of, name_of
from echelon.fields import option_text
from echelon.presets import PRESETS, preset
from echelon.presets.zoo import ZooResult, all_results, all_rows

UNKNOWN = "an environment that nobody has seen"
SHOWN = ("actor.", "learner.", "network.", "optimizer.", "algorithm.", "replay.", "env.kwargs", "evaluation.", "stop.")
NOTHING = ["no result is recorded for this environment"]


def run(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="echelon presets",
        description="Show the presets; the environments for which one has tuned values; or its values for one of them.",
    )
    parser.add_argument("preset", metavar="PRESET", nargs="?", help=", ".join(PRESETS))
    parser.add_argument("env", metavar="ENV", nargs="?", help="an environment, as for `echelon train`")
    parser.add_argument(
        "--family",
        metavar="FAMILY",
        default="",
        choices=FAMILIES,
        help=f"family of an ENV that is not known: {', '.join(FAMILIES)}",
    )
    known = parser.parse_args(list(arguments))
    if known.preset is None:
        lines = _overview()
    else:
        check_order(parser, known)
        if known.env is not None:
            place = known.preset, known.env, known.family
            lines = [*_unsupported_actions(*place), *_values(*place)]
        elif known.family:
            raise ConfigError(f"--family {known.family} has no effect without ENV. Remove it, or add ENV.")
        else:
            lines = _environments(known.preset)
    print("\n".join(lines))
    return 0


def _overview() -> list[str]:
    lines = []
    for name, function in PRESETS.items():
        about = (function.__doc__ or "").splitlines()[0]
        lines.append(f"{name:<10} {about}")
        reached = [_name_and_median(result) for result in all_results() if result.preset == name]
        if reached:
            lines.append(f"{'':<10} reached: {', '.join(reached)}")
    return [*lines, "", "`echelon presets PRESET` lists the environments with values of their own."]


def _environments(name: str) -> list[str]:
    """Returns a line for each row of the zoo that a preset has, itself or from the preset that it builds on."""
    targets = [target for row in all_rows() for target in row.targets]
    lines = [f"{name} has tuned values for these environments and families, and others for {UNKNOWN}:"]
    for target in dict.fromkeys(targets):
        family, env = (target, "x:y") if target in FAMILIES else ("", f"{target}-v0")
        changed = _changed(name, env, family)
        if target not in FAMILIES:  # what differs from the values of its family
            of_family = _changed(name, "x:y", family_of(env))
            changed = {path: value for path, value in changed.items() if of_family.get(path) != value}
        if changed:
            lines.append(f"  {target:<24} {', '.join(f'{path} {value}' for path, value in changed.items())}")
    if len(lines) == 1:
        lines = [f"{name} has no tuned values for environments or families."]
    results = [result for result in all_results() if result.preset == name]
    if results:
        lines += ["", "mean return of greedy episodes, per seed:", *map(_line, results)]
    return [*lines, "", f"`echelon presets {name} ENV` shows all values for an environment."]


def _unsupported_actions(name: str, env: str, family: str) -> list[str]:
    """Returns a line if the preset does not support the actions of an environment that comes with gymnasium.

    Raises ConfigError for an id that gymnasium would have, but has not. Other environments are not looked at.
    """
    if family:
        return []
    from echelon.envs.make import check_id, probe_spaces
    from echelon.schema import SUPPORTED_ACTIONS

    check_id(env)
    config = preset(name, env)
    try:
        action = probe_spaces(config.env).action if name_of(env) in FAMILY_OF and ":" not in env else None
    except ConfigError:  # its package is not installed
        action = None
    if action is None or isinstance(action, SUPPORTED_ACTIONS[config.algorithm.distribution]):
        return []
    return [f"{name} does not support the actions of {env}, {action}: `echelon check {env}` lists presets that do", ""]


def _values(name: str, env: str, family: str) -> list[str]:
    config = preset(name, env, family)
    changed = _changed(name, env, family)
    family = family or family_of(env)
    lines = [
        f"{name} on {env}, family {family}: {len(changed)} value{' differs' if len(changed) == 1 else 's differ'} from "
        f"those for {UNKNOWN} (marked *)"
        if changed
        else f"{name} on {env}, family {family}: the values for {UNKNOWN}"
    ]
    for info in fields_of(config):
        is_used = not info.path.startswith("replay.") or config.experience == "replay"
        if (info.path.startswith(SHOWN) or info.path in changed) and is_used:
            mark = "*" if info.path in changed else " "
            lines.append(f"{mark} --{info.path.replace('_', '-'):<38} {option_text(info.value)}")
    results = [r for r in all_results() if r.preset == name and name_of(r.env) == name_of(env)]
    return [*lines, "", *(["mean return of greedy episodes, per seed:", *map(_line, results)] if results else NOTHING)]


def _changed(name: str, env: str, family: str) -> dict[str, str]:
    """Returns the fields in which a preset for `env` differs from the preset for an unknown environment."""
    mine, plain = (fields_of(preset(name, id, kind)) for id, kind in ((env, family), ("x:y", "")))
    base = {info.path: info.value for info in plain}
    return {
        info.path: option_text(info.value)
        for info in mine
        if info.path not in ("env.id", "preset") and base.get(info.path, info) != info.value
    }


def _line(result: ZooResult) -> str:
    shown = ", ".join(f"{value:g}" for value in result.returns)
    return f"  {result.env:<26} {result.steps:>10,} steps   median {_median(result.returns):g} ({shown})"


def _name_and_median(result: ZooResult) -> str:
    return f"{name_of(result.env)} {_median(result.returns):g}"


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)
