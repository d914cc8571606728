"""`echelon resume RUN`: go on from the newest checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from echelon.cli.main import Parser, add_trust

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
    parser = Parser(prog="echelon resume", description="Resume a run from its newest checkpoint.")
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
    for name, meaning in HOSTS.items():
        parser.add_argument(f"--hosts.{name}", dest=f"hosts.{name.replace('-', '_')}", metavar="VALUE", help=meaning)
    known = parser.parse_args(list(arguments))
    fields = {path: text for path, text in vars(known).items() if path.startswith("hosts.") and text is not None}
    if known.address is not None:
        fields["address"] = known.address
    from echelon.training import resume

    resume(
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
    )
    return 0
