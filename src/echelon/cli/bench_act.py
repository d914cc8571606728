"""`echelon bench act`: actions per second of the inference server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from echelon.cli.main import Parser
from echelon.errors import ConfigError

TEXT = "Feed one inference server from processes that lay ready observations down, and measure its actions per second."


def make_parser() -> Parser:
    parser = Parser(prog="echelon bench act", description=TEXT, allow_abbrev=False)
    parser.add_argument(
        "--network", default="cnn", choices=("mlp", "cnn"), help="2,000 numbers, or 84x84x4 frames (cnn)"
    )
    parser.add_argument(
        "--batch", default="64,256,1024,4096", metavar="N,N", help="rows of a round, a measurement each (%(default)s)"
    )
    parser.add_argument(
        "--feeders", type=int, default=0, metavar="N", help="processes that ask; 0: a power of two, half of the cores"
    )
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"), help="on a GPU (float32)")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="time of each measurement (5)")
    parser.add_argument(
        "--max-wait-us", type=float, default=50_000.0, metavar="US", help="how long a round waits for a feeder (50000)"
    )
    parser.add_argument(
        "--spin-us", type=float, default=0.0, metavar="US", help="how long a feeder looks before it sleeps (0)"
    )
    parser.add_argument("--shm-dir", default="/dev/shm", metavar="DIR", help="where the shared memory lies (/dev/shm)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the whole report here too")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Measures and prints the table; returns the exit code."""
    known = make_parser().parse_args(list(arguments))
    path = Path(known.json) if known.json else None
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"--json {path} cannot be written: name a file in a folder that exists.")
    sizes = known.batch.split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise ConfigError(f"--batch {known.batch} is not a list of numbers. Write it as in --batch 64,256.")

    from echelon.bench.act import ActSetting, bench_act, default_feeders, table
    from echelon.runs.metrics import plain

    setting = ActSetting(
        network=known.network,
        batches=tuple(int(size) for size in sizes),
        feeders=known.feeders or default_feeders(),
        device=known.device,
        precision=known.precision,
        seconds=known.seconds,
        max_wait_us=known.max_wait_us,
        spin_us=known.spin_us,
        shm_dir=known.shm_dir,
    )
    report = bench_act(setting)
    print(table(report))
    if path is not None:
        path.write_text(json.dumps(plain(report), indent=2) + "\n", encoding="utf-8")
    return 0
