"""`echelon bench rpc`: latency and throughput of act requests, once or for every value of one argument."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.bench.rpc.report import Report
from echelon.bench.rpc.setting import TRANSPORTS, Setting, backend_of, check_setting
from echelon.cli.main import Parser
from echelon.cli.output import check_writable, progress_bar
from echelon.errors import ConfigError

TEXT = """\
Measure act requests: an agent process and WORLD_SIZE - 2 observer processes. Each observer sends a random state and
waits for the action, EPISODES x STEPS times after a warm-up. One argument may be a comma-separated list, which becomes
the x axis: one run for each of its values. `echelon bench plot` draws the report of such a sweep.
"""
HELP = {
    "world_size": "processes: a coordinator, an agent, and the rest observers",
    "master_addr": "where the agent listens (tcp, torch-rpc)",
    "master_port": "its port; 0 takes a free one",
    "batch": "whether the agent answers all observers together (True, False)",
    "state_size": "the dimensions of a state, with dashes",
    "nlayers": "hidden layers of the policy",
    "out_features": "actions, and the width of the layers",
    "output_file_path": "the report, as JSON",
    "episodes": "episodes of each observer",
    "steps": "requests of an observer in one episode",
    "transport": f"what carries the requests: {', '.join(TRANSPORTS)}",
    "device": "where the policy is computed: cpu, cuda",
    "max_wait_us": "how long a batch waits for an observer, in microseconds (shm, tcp)",
    "shm_dir": "where shared memory lives (shm, tcp)",
}
NEVER_A_LIST = ("master_addr", "master_port", "output_file_path", "shm_dir")
TRUE, FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


def make_parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="echelon bench rpc", description=TEXT, formatter_class=formatter, allow_abbrev=False)
    for field in dataclasses.fields(Setting):
        spellings = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}", f"-{field.name}"))
        text = f"{HELP[field.name]} ({field.default})"
        parser.add_argument(*spellings, default=str(field.default), metavar=field.name.upper(), help=text)
    return parser


def parse_settings(arguments: Sequence[str]) -> tuple[list[Setting], str]:
    """The runs that `arguments` ask for, and the name of the argument that varies ("" if none does)."""
    texts: dict[str, str] = vars(make_parser().parse_args(list(arguments)))
    lists = [name for name, text in texts.items() if "," in text and name not in NEVER_A_LIST]
    if len(lists) > 1:
        given = " and ".join(f"{name}={texts[name]}" for name in lists)
        raise ConfigError(f"Only 1 x axis graph variable allowed, but {given} are lists. Give a list to one of them.")
    values = {name: parse_value(name, text) for name, text in texts.items() if name not in lists}
    if not lists:
        return [Setting(**values)], ""
    (x_axis_name,) = lists
    xs = [parse_value(x_axis_name, text) for text in texts[x_axis_name].split(",")]
    return [Setting(**values, **{x_axis_name: x}) for x in xs], x_axis_name


def parse_value(name: str, text: str) -> Any:
    """The value of one argument in its type."""
    kind = type(getattr(Setting(), name))
    word = text.strip()
    if kind is bool:
        if word.lower() in TRUE + FALSE:
            return word.lower() in TRUE
        raise ConfigError(f"{name}={text!r}: Boolean value expected. Write True or False.")
    try:
        return kind(word)
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} is not a number. Write --{name} {getattr(Setting(), name)}.") from error


def run(arguments: Sequence[str]) -> int:
    settings, x_axis_name = parse_settings(arguments)
    path = Path(settings[0].output_file_path)
    check_writable(path, "--output_file_path")
    for setting in settings:
        check_setting(setting)
    report = Report(settings, x_axis_name)
    print(report.head(), flush=True)
    for number, setting in enumerate(settings, 1):
        value = f"{x_axis_name} {getattr(setting, x_axis_name)}" if x_axis_name else setting.transport
        with progress_bar(f"{value} ({number}/{len(settings)})", "requests") as progress:
            raw = backend_of(setting.transport)(setting, progress)
        report.add(setting, raw)
        print(report.last(), flush=True)
        report.write(path)  # after every run: a later one may fail
    more = f"; `echelon bench plot {path}` draws it" if x_axis_name else ""
    print(f"the report is in {path}{more}", file=sys.stderr)
    return 0
