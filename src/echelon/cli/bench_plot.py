"""`echelon bench plot REPORT`: the figures of a report of `echelon bench rpc` or `echelon bench replay`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from echelon.cli.main import Parser

TEXT = """\
Draw a sweep of `echelon bench rpc`, or a report of `echelon bench replay`: figures as PNG, and one HTML page with all
of it.
"""


def run(arguments: Sequence[str]) -> int:
    parser = Parser(prog="echelon bench plot", description=TEXT, allow_abbrev=False)
    parser.add_argument("report", metavar="REPORT", help="the JSON file that the benchmark wrote")
    parser.add_argument(
        "--output-dir", "--output_dir", metavar="DIR", help="where the files go (the folder of the report)"
    )
    known = parser.parse_args(list(arguments))

    from echelon.bench.plot import draw_report

    for path in draw_report(Path(known.report), Path(known.output_dir) if known.output_dir else None):
        print(path)
    return 0
