"""`echelon bench NAME`: benchmarks on this machine, one subcommand each."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from echelon.bench.async_setting import DEFAULTS, MIN_ITERATIONS, SETS_STOP, AsyncSetting
from echelon.bench.harness import Benchmark, Runs, Sweep, write_report
from echelon.cli.file_options import config_file_of
from echelon.cli.main import Parser
from echelon.cli.output import check_writable, progress_bar
from echelon.cli.train import SHORT, read_options
from echelon.cli.train import make_parser as make_train_parser
from echelon.errors import ConfigError

# The description of each benchmark; its module is imported only when it runs.
BENCHES = {
    "train": "steps per second of a training, compared with the limit of its cores: echelon bench train PRESET ENV",
    "async": "throughput of synchronous and asynchronous PPO, compared with its bound: echelon bench async ENV",
    "rpc": "latency and throughput of act requests over each transport: echelon bench rpc",
    "replay": "inserts, samples, priority updates and memory of the replay: echelon bench replay",
    "world": "calls between two processes, compared with torch.distributed.rpc: echelon bench world",
    "plot": "draws a report of `rpc`, `replay` or `async`: echelon bench plot REPORT",
    "act": "actions per second of the inference server: echelon bench act",
}
SWEPT = {
    "rpc": "echelon.bench.rpc:RpcBenchmark",
    "replay": "echelon.bench.replay:ReplayBenchmark",
    "world": "echelon.bench.world:WorldBenchmark",
    "act": "echelon.bench.act:ActBenchmark",
}

ASYNC_OPTIONS = ("device", "acting", "seed", "env-kwargs", "on-env-error", "shm-dir")
ASYNC_TEXT = """\
Train PPO synchronously (one actor) and asynchronously (N actors that roll out while the learner learns), for each
number K of environments per actor. Report the mean time T between two iterations of the learner, EPS = K / T, and the
bound of this machine, which follows from a rollout and an iteration of the learner, measured alone.

Unless set by options: trajectories of 512 steps (--actor.trajectory), 20 passes (--algorithm.epochs), three layers of
32 (--network.hidden), a learning rate of 3e-4, an entropy weight of 0.01, two slots per actor (--actor.slots).
"""


def run(arguments: Sequence[str]) -> int:
    """Runs one benchmark; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"  {name:<8} {text}" for name, text in BENCHES.items()]
        print("\n".join(["benchmarks:", *lines, "", "`echelon bench NAME --help` shows the options."]))
        return 0
    name, *rest = arguments
    if name not in BENCHES:
        raise ConfigError(f"there is no benchmark {name!r}. Benchmarks: {', '.join(BENCHES)}.")
    if name in SWEPT:
        return run_benchmark(make_benchmark(name), rest)
    return {"train": run_train, "async": run_async, "plot": run_plot}[name](rest)


def make_benchmark(name: str) -> Benchmark[Any, Any]:
    module, _, kind = SWEPT[name].partition(":")
    benchmark: Benchmark[Any, Any] = getattr(import_module(module), kind)()
    return benchmark


def make_parser(benchmark: Benchmark[Any, Any]) -> argparse.ArgumentParser:
    """Returns a parser with an option for every field of the benchmark's setting, and one for the report."""
    prog, formatter = f"echelon bench {benchmark.name}", argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=prog, description=benchmark.text, formatter_class=formatter, allow_abbrev=False)
    options = benchmark.setting.options()
    for name, option in options.items():
        help = f"{option.help} ({option.shown})" if option.shown else option.help
        spellings, metavar = benchmark.spellings(name), benchmark.metavar(name)
        parser.add_argument(*spellings, dest=name, default=option.default, metavar=metavar, help=help)
    if benchmark.output not in options:
        parser.add_argument(f"--{benchmark.output}", default="", metavar="FILE", help=benchmark.output_help)
    return parser


def run_benchmark(benchmark: Benchmark[Any, Any], arguments: Sequence[str]) -> int:
    """Measures every setting of the arguments, prints and writes the results; returns the exit code."""
    texts: dict[str, str] = vars(make_parser(benchmark).parse_args(list(arguments)))
    options = benchmark.setting.options()
    chosen = {name: text for name, text in texts.items() if name in options}
    sweep = Sweep.parse(benchmark.setting, chosen, benchmark.swept, benchmark.max_varied)
    path = Path(texts[benchmark.output]) if texts[benchmark.output] else None
    if path is not None:
        check_writable(path, f"--{benchmark.output}")
    benchmark.prepare(sweep.settings)
    runs: Runs[Any, Any] = Runs(sweep)
    _say(benchmark.head(sweep))
    for number, setting in enumerate(sweep.settings, 1):
        varied = ", ".join(f"{name} {value}" for name, value in sweep.values(setting).items())
        label = f"{varied or benchmark.label(setting)} ({number}/{len(sweep.settings)})"
        with progress_bar(label, benchmark.unit(setting)) as progress:
            runs.results.append(benchmark.measure(setting, progress))
        _say(benchmark.newest(runs))
        if path is not None:
            write_report(path, benchmark.report(runs))  # after every run, as a later run may fail
    _say(benchmark.summary(runs))
    if path is not None:
        drawn = f"; `echelon bench plot {path}` draws it" if benchmark.is_drawn(sweep) else ""
        print(f"the report is in {path}{drawn}", file=sys.stderr)
    fault = benchmark.fault(runs)
    if fault:
        print(f"echelon: {fault}", file=sys.stderr)
    return 1 if fault else 0


def _say(text: str) -> None:
    if text:
        print(text, flush=True)


def run_train(arguments: Sequence[str]) -> int:
    """Runs `echelon bench train PRESET ENV`: the options of `echelon train`, and two more."""
    prog = "echelon bench train"
    text = "Train for a fixed time, without evaluation, and compare the rate with the limit of its cores."
    own, parser = Parser(prog=prog, add_help=False, allow_abbrev=False), make_train_parser(prog, text, arguments)
    for each in (own, parser):  # `own` parses them first; `parser` shows them in its help
        each.add_argument(
            "--seconds", type=float, default=20.0, metavar="S", help="training time, including the start (default 20)"
        )
        each.add_argument("--json", default="", metavar="FILE", help="also write the full report to FILE")
    known, rest = own.parse_known_args(list(arguments))
    parsed = read_options(parser, rest, observe=True)
    if parsed.dry_run:
        parsed.print_toml(prog)
        return 0
    config = parsed.config
    path = Path(known.json) if known.json else None
    if path is not None:
        check_writable(path, "--json")

    from echelon.bench.train import bench_train, table

    report = bench_train(config, seconds=known.seconds)
    print(table(report))
    if path is not None:
        write_report(path, report)
    return 0


def run_async(arguments: Sequence[str]) -> int:
    """Runs `echelon bench async ENV`: options of its own, and those of `echelon train ppo`."""
    prog, default = "echelon bench async", AsyncSetting()
    options = {name: SHORT[name] for name in ASYNC_OPTIONS}
    own = Parser(prog=prog, add_help=False, allow_abbrev=False)
    parser = make_train_parser(prog, ASYNC_TEXT, ("ppo", *arguments), options, ("ppo",), values=DEFAULTS)
    for each in (own, parser):  # `own` parses them first; `parser` shows them in its help
        add = each.add_argument
        add("--envs-per-actor", default=default.envs, type=_numbers, metavar="K,K", help="list of K (32,48,96)")
        add("--actors", dest="num_actors", default=2, type=int, metavar="N", help="actors of async (2)")
        text = "one more K, for sync alone; 0: none (N times the largest K: as many environments as async has)"
        add("--sync-envs", type=int, metavar="K", help=text)
        add("--minibatch", default=default.minibatch, type=int, metavar="STEPS", help="steps of a minibatch (4096)")
        text = f"length of a run; at least {MIN_ITERATIONS} iterations are measured (20; with --time-to-score 600)"
        add("--seconds", type=float, metavar="S", help=text)
        add("--rounds", default=default.rounds, type=int, metavar="R", help="rounds; the table has medians (1)")
        text = "train until the mean return of 100 episodes is R, and report time and steps"
        add("--time-to-score", dest="score", type=float, metavar="R", help=text)
        add(
            "--output",
            default="",
            metavar="FILE",
            help="write the report here, as JSON, with pictures and an HTML page beside it",
        )
    known, rest = own.parse_known_args(list(arguments))
    if {word.partition("=")[0] for word in rest} & {"--steps", "--minutes", "--episodes", "--until-return"}:
        raise ConfigError(SETS_STOP)
    values = vars(known)
    path = Path(output) if (output := values.pop("output")) else None
    if path is not None:
        check_writable(path, "--output")
    file = config_file_of(rest)
    has_all, has = file is not None and file.complete is not None, file.values if file is not None else {}
    defaults = (
        {} if has_all else {field: text for field, text in DEFAULTS.items() if field.replace("-", "_") not in has}
    )
    seeded = [word for field, text in defaults.items() for word in (f"--{field}", text)]
    parsed = read_options(parser, [*seeded, *rest], options)
    if parsed.dry_run:
        parsed.print_toml(prog)
        return 0
    config = parsed.config
    setting = AsyncSetting(envs=values.pop("envs_per_actor"), **values, with_timelines=path is not None)

    from echelon.bench.async_training import bench_async, table

    with _raised_signals():
        report = bench_async(
            config,
            setting,
            lambda label: progress_bar(label, "iterations"),
            lambda report: None if path is None else write_report(path, report),
        )
    print(table(report))
    if path is not None:
        from echelon.bench.plot import draw_report

        print(f"the report is in {path}, its pictures in {', '.join(map(str, draw_report(path)))}", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _raised_signals() -> Iterator[None]:
    """Raises KeyboardInterrupt on SIGTERM and SIGHUP, too, so that files and shared memory are removed."""
    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]  # nohup
    previous = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers: write 32,48,96") from None


def run_plot(arguments: Sequence[str]) -> int:
    """Runs `echelon bench plot REPORT`: prints the files it has drawn, one per line."""
    text = """\
Draw a sweep of `echelon bench rpc`, or a report of `echelon bench replay` or `echelon bench async`: figures as PNG, and
one HTML page with all figures and tables.
"""
    parser = Parser(prog="echelon bench plot", description=text, allow_abbrev=False)
    parser.add_argument("report", metavar="REPORT", help="the JSON file that the benchmark wrote")
    parser.add_argument(
        "--output-dir", "--output_dir", metavar="DIR", help="folder for the files (the folder of the report)"
    )
    known = parser.parse_args(list(arguments))

    from echelon.bench.plot import draw_report

    for path in draw_report(Path(known.report), Path(known.output_dir) if known.output_dir else None):
        print(path)
    return 0
