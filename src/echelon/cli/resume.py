"""`echelon resume RUN`: go on from the newest checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from echelon.cli.callback_options import add_callback
from echelon.cli.main import Parser, add_trust
from echelon.errors import ConfigError

HOSTS = {
    "min-actors": "actors that always run from now on",
    "address": "where the run listens for other hosts from now on",
    "bulk-port": "port for trajectories and weights from now on",
    "lease-s": "seconds without contact after which a host is given up",
}


def whole(text: str) -> int:
    """A whole number, as `train` takes it: 2000000, 2_000_000 or 2e6."""
    number = float(text)
    if not number.is_integer():  # nor are inf and nan
        raise ValueError(text)
    return int(number)


def run(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="echelon resume",
        description="Resume a run from its newest checkpoint. New totals replace all limits of the run.",
    )
    parser.add_argument("run", metavar="RUN", help="the run folder")
    parser.add_argument("--steps", type=whole, default=0, metavar="TOTAL", help="new total of environment steps")
    parser.add_argument("--minutes", type=float, default=0.0, metavar="TOTAL", help="new total of minutes")
    parser.add_argument("--until-return", type=float, default=None, metavar="R", help="new return to stop at")
    parser.add_argument("--episodes", type=whole, default=0, metavar="TOTAL", help="new total of episodes")
    parser.add_argument("--epochs", type=whole, default=None, help=argparse.SUPPRESS)  # the old name of --episodes
    parser.add_argument("--learners", type=whole, default=None, metavar="N", help="learner processes from now on")
    parser.add_argument("--hosts", type=whole, default=None, metavar="N", help="hosts from now on, this one among them")
    parser.add_argument("--engine", choices=["local", "hosts", "ray"], help="engine from now on")
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="where the run listens for workers, or its Ray cluster, from now on"
    )
    add_trust(parser)
    add_callback(parser)
    for name, meaning in HOSTS.items():
        parser.add_argument(f"--hosts.{name}", dest=f"hosts.{name.replace('-', '_')}", metavar="VALUE", help=meaning)
    known, rest = parser.parse_known_args(list(arguments))
    if stray := next((word for word in rest if word.startswith("--")), None):
        raise ConfigError(
            f"{stray.partition('=')[0]} is no option of `echelon resume`: a resumed run keeps its configuration, "
            "except for what `echelon resume --help` lists. Start a new run from its weights with `echelon train "
            "PRESET ENV --init-from RUN`, or change the learning rate in a callback: training.set(learning_rate=1e-4)."
        )
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    fields = {path: text for path, text in vars(known).items() if path.startswith("hosts.") and text is not None}
    if known.address is not None:
        fields["address"] = known.address
    from echelon.training import resume

    result = resume(
        known.run,
        steps=known.steps,
        minutes=known.minutes,
        until_return=known.until_return,
        episodes=known.episodes,
        learners=known.learners,
        hosts=known.hosts,
        engine=known.engine,
        epochs=known.epochs,
        fields=fields,
        trust=known.trust,
        callbacks=known.callback,
    )
    return result.exit_code
