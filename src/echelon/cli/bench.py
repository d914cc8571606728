"""`echelon bench NAME`: measurements of this machine, one subcommand each."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from echelon.errors import ConfigError

# What each is, and the function that runs it; its module is imported only then.
BENCHES = {
    "train": (
        "a training's steps per second beside the machine's limit: echelon bench train PRESET ENV",
        "echelon.cli.bench_train:run",
    ),
    "rpc": (
        "latency and throughput of act requests over each transport: echelon bench rpc",
        "echelon.cli.bench_rpc:run",
    ),
    "replay": (
        "replay: inserts, draws, new priorities and memory: echelon bench replay",
        "echelon.cli.bench_replay:run",
    ),
    "world": (
        "calls between two processes, beside torch.distributed.rpc: echelon bench world",
        "echelon.cli.bench_world:run",
    ),
    "plot": ("the figures of a report of `rpc` or `replay`: echelon bench plot REPORT", "echelon.cli.bench_plot:run"),
    "act": ("actions per second of the inference server: echelon bench act", "echelon.cli.bench_act:run"),
}


def run(arguments: Sequence[str]) -> int:
    """Runs one benchmark; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"  {name:<8} {text}" for name, (text, _) in BENCHES.items()]
        print("\n".join(["benchmarks:", *lines, "", "`echelon bench NAME --help` says more."]))
        return 0
    if arguments[0] not in BENCHES:
        raise ConfigError(f"there is no benchmark {arguments[0]!r}; there are {', '.join(BENCHES)}.")
    module, _, function = BENCHES[arguments[0]][1].partition(":")
    code: int = getattr(import_module(module), function)(arguments[1:])
    return code
