"""`echelon bench train PRESET ENV`: a training's rate beside what the machine could do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from echelon.cli.main import Parser
from echelon.cli.train import make_parser, parse_config
from echelon.errors import ConfigError

TEXT = "Train for a fixed time, without evaluation, and compare with what this machine could do."


def run(arguments: Sequence[str]) -> int:
    prog = "echelon bench train"
    own, parser = Parser(prog=prog, add_help=False, allow_abbrev=False), make_parser(prog, TEXT, arguments)
    for each in (own, parser):  # its own options are taken first; the training's parser shows them in its help
        each.add_argument("--seconds", type=float, default=20.0, metavar="S", help="time to train, start included (20)")
        each.add_argument("--json", default="", metavar="FILE", help="write the whole report here too")
    known, rest = own.parse_known_args(list(arguments))
    config = parse_config(parser, rest)
    path = Path(known.json) if known.json else None
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"--json {path} cannot be written: name a file in a folder that exists.")

    from echelon.bench.train import bench_train, table
    from echelon.runs.metrics import plain

    report = bench_train(config, seconds=known.seconds)
    print(table(report))
    if path is not None:
        path.write_text(json.dumps(plain(report), indent=2) + "\n", encoding="utf-8")
    return 0
