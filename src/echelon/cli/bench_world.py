"""`echelon bench world`: how fast calls between processes are, beside torch.distributed.rpc."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from echelon.bench.world.setting import PEERS, TRANSPORTS, Setting
from echelon.cli.bench_values import parse_value
from echelon.cli.main import Parser
from echelon.cli.output import check_writable, progress_bar

TEXT = """\
Measure calls between two processes of a world, and of torch.distributed.rpc, which take turns on this machine:
  small round trip        one call after another, with a tensor that comes back
  large echo              the same with a large tensor; the bytes of both ways are counted
  small calls             calls per second with many under way
"""
HELP = {
    "small": "bytes of the small tensor",
    "large": "bytes of the large tensor",
    "in_flight": "calls under way at once, for calls per second",
    "seconds": "time of each figure in a turn",
    "rounds": "turns of each library; medians are told",
    "transport": f"what carries the calls of ours: {', '.join(TRANSPORTS)}",
    "peer": f"what is measured beside it: {', '.join(PEERS)}",
}


def make_parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="echelon bench world", description=TEXT, formatter_class=formatter, allow_abbrev=False)
    for field in dataclasses.fields(Setting):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=str(field.default),
            metavar="VALUE",
            help=f"{HELP[field.name]} ({field.default})",
        )
    parser.add_argument("--output", default="", metavar="FILE", help="write the report here, as JSON")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Measures and prints a table; returns the exit code."""
    texts: dict[str, str] = vars(make_parser().parse_args(list(arguments)))
    path = Path(output) if (output := texts.pop("output")) else None
    if path is not None:
        check_writable(path, "--output")
    defaults = Setting()
    setting = Setting(**{name: parse_value(getattr(defaults, name), name, text) for name, text in texts.items()})

    from echelon.bench.world.report import Report
    from echelon.bench.world.run import run as measure

    with progress_bar(f"world over {setting.transport}", "turns") as progress:
        report = Report(setting, measure(setting, progress))
    print(report.table(), flush=True)
    if path is not None:
        report.write(path)
        print(f"\nthe report is in {path}", file=sys.stderr)
    return 0
