"""`echelon bench replay`: how fast replay inserts, draws and takes new priorities, and what memory it takes."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from echelon.bench.replay.setting import PEERS, Setting
from echelon.cli.bench_values import parse_value
from echelon.cli.main import Parser
from echelon.cli.output import check_writable, progress_bar

TEXT = """\
Measure prioritized replay, full, with cpprb beside it where that is installed:
  in one process          insert, sample, update, sample+update, and mixed: a chunk in for every batch out
  --writers 4             the learner's side while that many processes append to shards of their own; items are checked
  --frames 84x84x4        stacked frames, each stored once: memory as the kernel counts it
Arguments may be comma-separated lists: one run for each of their combinations. `echelon bench plot` draws the report.
"""
HELP = {
    "batch": "items that are drawn at once",
    "capacity": "items over all shards",
    "chunk": "items that are inserted at once",
    "observation": "float32 numbers of an observation; an item has two, and an action, a reward and a discount",
    "shards": "shards; 0: one, or one for each writer",
    "writers": "processes that append, each to its shard; 0: everything in one process",
    "rate": "items that each writer appends in a second",
    "frames": "height x width x stack of uint8 images, instead of floats",
    "alpha": "exponent of the priorities",
    "seconds": "time of each measurement: one operation of one buffer",
    "rounds": "turns that a measurement is cut into; buffers and operations alternate, medians are told",
    "peer": f"what is measured beside it: {', '.join(PEERS)}",
    "shm_dir": "where shared memory lives",
}
NEVER_A_LIST = ("shm_dir",)
UNITS = {"process": "rounds", "writers": "items, then rounds", "frames": "transitions"}


def make_parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="echelon bench replay", description=TEXT, formatter_class=formatter, allow_abbrev=False)
    for field in dataclasses.fields(Setting):
        default = str(field.default)
        shown = f" ({default})" if default else ""
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", default=default, metavar="VALUE", help=f"{HELP[field.name]}{shown}"
        )
    parser.add_argument("--output", default="", metavar="FILE", help="write the report here, as JSON")
    return parser


def parse_settings(texts: dict[str, str]) -> tuple[list[Setting], list[str]]:
    """The runs that arguments ask for, and the names of those that vary."""
    words = {name: [text] if name in NEVER_A_LIST else text.split(",") for name, text in texts.items()}
    defaults = Setting()
    lists = {name: [parse_value(getattr(defaults, name), name, word) for word in each] for name, each in words.items()}
    varied = [name for name, values in lists.items() if len(values) > 1]
    settings = [Setting(**dict(zip(lists, values, strict=True))) for values in itertools.product(*lists.values())]
    return settings, varied


def run(arguments: Sequence[str]) -> int:
    """Measures and prints a table of every run; returns the exit code, 1 if an item tore."""
    texts: dict[str, str] = vars(make_parser().parse_args(list(arguments)))
    path = Path(output) if (output := texts.pop("output")) else None
    if path is not None:
        check_writable(path, "--output")
    settings, varied = parse_settings(texts)

    from echelon.bench.replay.buffers import MISSING, check_memory, has_peer
    from echelon.bench.replay.report import Report
    from echelon.bench.replay.setting import run as measure

    for setting in settings:
        check_memory(setting)
    if any(setting.mode != "frames" and setting.peer != "none" for setting in settings) and not has_peer():
        print(MISSING, file=sys.stderr)
    report, num_torn = Report(settings, varied), 0
    for number, setting in enumerate(settings, 1):
        value = ", ".join(f"{name} {getattr(setting, name)}" for name in varied) or setting.mode
        with progress_bar(f"{value} ({number}/{len(settings)})", UNITS[setting.mode]) as progress:
            result = measure(setting, progress)
        report.add(setting, result)
        print(report.last(), flush=True)
        num_torn += int(result.facts.get("num_torn", 0))
        if path is not None:
            report.write(path)  # after every run: a later one may fail
    if path is not None:
        print(f"\nthe report is in {path}; `echelon bench plot {path}` draws it", file=sys.stderr)
    if num_torn:
        print(f"echelon: {num_torn} items were torn: readers saw what was being overwritten.", file=sys.stderr)
    return 1 if num_torn else 0
