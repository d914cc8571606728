"""`echelon`: a subcommand for each thing to do; exit code 2 for a mistake of the user's, 1 for a failed run.

A signal that stops a command gives the exit code of a program that it ends: 130 for Ctrl-C, 143 for SIGTERM, 129 for
SIGHUP. 141 where the reader of the output left (`echelon … | head`), as for SIGPIPE.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import select
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, TextIO

from echelon.errors import ConfigError, DivergedError, EchelonError, escaped_lines
from echelon.runs.nonblocking import nonblocking_output

NOT_READ = 128 + signal.SIGPIPE
TRAINING = ("train", "resume", "learner")  # they handle signals from the start of the run on (`Interrupts`)
LONG_RUNNING = (*TRAINING, "worker", "host")  # a stalled reader of their output must not stop them
COMMANDS = {
    "train": "train a policy: echelon train PRESET ENV",
    "presets": "show presets, their values for an environment, and their results: echelon presets [PRESET] [ENV]",
    "check": "check an environment, and show the network it gets and its speed: echelon check ENV",
    "resume": "continue a run from its newest checkpoint: echelon resume RUN",
    "list": "list runs, newest first: echelon list [DIR]",
    "compare": "compare runs and groups of seeds, as tables and a picture: echelon compare RUN...",
    "learner": "learn from the episodes of workers: echelon learner PRESET ENV",
    "worker": "collect episodes for a learner: echelon worker --learner HOST:PORT",
    "host": "run actors of a training on this host: echelon host --join HOST:PORT",
    "kube": "render Kubernetes objects of a training: echelon kube render --flavour plain|kuberay",
    "eval": "play episodes with the weights of a run, and show their returns: echelon eval RUN",
    "play": "watch episodes of a run, as mp4 and gif or in a window: echelon play RUN",
    "export": "write a run's policy as ONNX, torch.export program or safetensors: echelon export RUN --format onnx",
    "bench": "run a benchmark: echelon bench train | async | rpc | act | replay | world | plot",
    "doctor": "check this machine: cores, GPU, shared memory, leftovers of killed runs",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError, so that all mistakes are reported in the same way."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}. `{self.prog} --help` lists the options.")

    def print_help(self, file: Any = None) -> None:
        """Prints and flushes the help, so that a closed pipe raises here and not when the interpreter exits."""
        print(self.format_help(), end="", file=file, flush=True)


def add_trust(parser: Parser) -> None:
    parser.add_argument(
        "--trust",
        action="store_true",
        help="import and run code that the run's configuration names, although it was written by somebody else, on "
        "another machine, or edited: environments of other packages or files, wrappers, networks",
    )


def add_status_file(parser: Parser) -> None:
    parser.add_argument(
        "--status-file",
        default="",
        metavar="FILE",
        help="file for health probes: it holds `joined` while this process takes part in a run, else `waiting`; its "
        "modification time is that of the last progress",
    )


def parse_env_kwargs(text: str) -> dict[str, Any]:
    """Returns the value of --env-kwargs; raises ConfigError if it is no JSON object."""
    from echelon.config import TrainConfig
    from echelon.config_io import set_fields

    return set_fields(TrainConfig(), {"env.kwargs": text}).env.kwargs


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Without `argv`, this is the program: it decides about Ctrl-C."""
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules are imported, Python would print or lose it
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        is_long = any(arguments[:1] == [name] for name in LONG_RUNNING) and not {"-h", "--help", "--dry-run"} & {
            *arguments
        }
        with nonblocking_output() if is_long else contextlib.nullcontext():
            code = _run(arguments)
            print(end="", flush=True)
        return code
    except BrokenPipeError:
        if not (broken := [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]):
            raise  # it is another pipe
        for stream in broken:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())  # takes what is still buffered when the interpreter ends
        return NOT_READ


def _is_unread(stream: TextIO) -> bool:
    """Whether `stream` is a pipe whose reader left."""
    poller = select.poll()
    try:
        poller.register(stream, 0)
    except (TypeError, ValueError, OSError):  # closed from the start, or no file
        return False
    return any(events & select.POLLERR for _, events in poller.poll(0))


def _run(arguments: list[str]) -> int:
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(_overview())
            return 0
        if arguments[0] == "--version":
            from echelon import __version__

            print(f"echelon {__version__}")
            return 0
        if arguments[0] not in COMMANDS:
            close = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(f"there is no command {arguments[0]!r}; use one of {', '.join(COMMANDS)}.{hint}")
        command = import_module(f"echelon.cli.{arguments[0]}")
        if arguments[0] not in TRAINING and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code: int = command.run(arguments[1:])
        return code
    except (ConfigError, DivergedError) as error:
        print(f"echelon: {escaped_lines(str(error))}", file=sys.stderr)
        return 2
    except EchelonError as error:
        print(f"echelon: {escaped_lines(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print("echelon: interrupted", file=sys.stderr)
        number = error.args[0] if error.args else None  # `Interrupts` gives the signal; other code may give a text
        return 128 + (number if isinstance(number, int) else signal.SIGINT)


def _overview() -> str:
    lines = [f"  {name:<8} {text}" for name, text in COMMANDS.items()]
    head = "Echelon trains reinforcement-learning policies with many processes, on PyTorch.\n\ncommands:"
    codes = (
        "exit codes: 0 done, 1 failed, 2 a mistake in the command or configuration, or NaN, 130 stopped by\n"
        "Ctrl-C, 143 by SIGTERM, 129 by SIGHUP (`host`: 0). A training that is stopped saves a checkpoint first:\n"
        "`echelon resume RUN`."
    )
    tail = "`echelon COMMAND --help` lists the options of a command."
    return "\n".join([head, *lines, "", codes, "", tail])


if __name__ == "__main__":
    sys.exit(main())
