"""`echelon compare RUN...`: results and configuration differences of runs, and their returns as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from echelon.cli.main import Parser
from echelon.cli.output import check_writable, progress_bar
from echelon.errors import ConfigError
from echelon.runs.comparison import (
    FORMATS,
    difference_table,
    draw_comparison,
    find_entries,
    read_curves,
    result_table,
)


def run(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="echelon compare",
        description="Compare runs: a table of their results, the configuration values that differ, and a picture of "
        "the return over environment steps. Several seeds of one configuration are one row with the median and the "
        "quartiles, and one line with the interquartile range as a band.",
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="a run folder, or a folder of runs as `echelon train --seeds` makes it"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="compare.png",
        help=f"the picture: {', '.join(FORMATS)} (default compare.png, which is replaced)",
    )
    known = parser.parse_args(list(arguments))
    output = Path(known.output)
    if output.suffix not in FORMATS:
        raise ConfigError(f"-o {output} must end with one of {', '.join(FORMATS)}.")
    check_writable(output, "-o")
    entries = find_entries([Path(path) for path in dict.fromkeys(known.runs)])
    print("\n".join(result_table(entries)))
    if differences := difference_table(entries):
        print("\n".join(["", *differences]))
    elif len(entries) > 1:
        print("\nthe configurations are equal, apart from seeds and folders")
    with progress_bar("reading metrics", "runs") as show:
        curves = read_curves(entries, show)
        draw_comparison(entries, curves, output)
    print(f"\npicture     {output}")
    return 0
