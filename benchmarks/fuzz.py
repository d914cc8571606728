"""Fuzzing: feeds mutated input to Echelon and checks that all of it is refused or handled, never crashes.

    make fuzz                                                   # every kind, a few minutes
    python benchmarks/fuzz.py frames --count 10000000           # messages, decoded in memory
    python benchmarks/fuzz.py sockets --count 100000            # messages and bytes over TCP
    python benchmarks/fuzz.py folders --count 3000              # run folders, by eval and resume
    python benchmarks/fuzz.py cli --count 100000                # command lines
    python benchmarks/fuzz.py KIND --seed S --block B           # repeats one block of trials
    python benchmarks/fuzz.py --help                            # all kinds

Trials run in blocks, spread over processes; a block's input is determined by the seed and the block's number. A finding
ends the run: it prints the command that repeats it, writes the input to `--save`, and exits with 1.
"""

from __future__ import annotations

import argparse
import importlib

from fuzzing import harness

KINDS = {  # each is a module of `fuzzing` with DEFAULT_COUNT, BLOCK, add_options(parser) and make(options) -> Trial
    "frames": "messages of every wire, decoded in memory",
    "folders": "run folders, read by eval and resume",
    "cli": "command lines",
    "sockets": "messages and bytes, to servers of the channel over TCP",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, what in KINDS.items():
        module = importlib.import_module(f"fuzzing.{kind}")
        kind_parser = kinds.add_parser(kind, help=what, description=what)
        harness.add_options(kind_parser, module.DEFAULT_COUNT, module.BLOCK)
        module.add_options(kind_parser)
    options = parser.parse_args()
    module = importlib.import_module(f"fuzzing.{options.kind}")
    return harness.run(options.kind, lambda: module.make(options), options)


if __name__ == "__main__":
    raise SystemExit(main())
