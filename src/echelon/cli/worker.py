"""`echelon worker --learner HOST:PORT`: sends episodes to a learner until its run ends."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import NoReturn

from echelon.cli.main import Parser, add_status_file
from echelon.errors import ConfigError


def run(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="echelon worker",
        description="Step environments with a learner's newest policy and send it the episodes, until its run ends. "
        "A worker on another machine, or of another user, needs the ECHELON_SECRET of the learner.",
    )
    parser.add_argument("--learner", required=True, metavar="HOST:PORT", help="address of `echelon learner`")
    parser.add_argument("--envs", type=int, default=1, metavar="K", help="environments stepped together (default 1)")
    parser.add_argument(
        "--env", metavar="ENV", help="environment in place of the learner's: an id, module:factory or envpool:ID"
    )
    parser.add_argument(
        "--trust-learner",
        action="store_true",
        help="import and run code that the learner names: environments of other packages or files, wrappers, networks",
    )
    parser.add_argument("--env-wrapper", metavar="MODULE:NAME", help="wrapper applied to each single environment")
    parser.add_argument(
        "--policy", metavar="MODULE:NAME", help="creates the policy, for a learner that trains a user's own policy"
    )
    parser.add_argument(
        "--buffer-size", type=int, default=5000, metavar="N", help="maximum number of steps per message"
    )
    parser.add_argument(
        "--episodes", type=int, default=0, metavar="N", help="leave after N episodes (0: at the end of the run)"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="seed of the environments (default: drawn)")
    parser.add_argument(
        "--patience",
        type=float,
        default=float("inf"),
        metavar="S",
        help="leave if the learner is silent for S seconds (default: never)",
    )
    add_status_file(parser)
    known = parser.parse_args(list(arguments))
    from echelon.asynchronous.worker import AsyncWorker
    from echelon.names import resolve

    made = {name: resolve(text) for name in ("env_wrapper", "policy") if (text := getattr(known, name))}
    for name, target in made.items():
        if not callable(target):
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(known, name)} is {target!r:.80}, not a callable.")
    worker = AsyncWorker(
        known.learner,
        known.buffer_size,
        made.get("env_wrapper"),
        env=known.env,
        envs=known.envs,
        policy=made["policy"]() if "policy" in made else None,
        seed=known.seed,
        patience_s=known.patience,
        trust_learner=known.trust_learner,
        status_file=known.status_file,
    )
    for number in (signal.SIGTERM, signal.SIGHUP):  # sign off from the learner on these, too
        signal.signal(number, _leave)
    worker.work(known.episodes)
    return 0


def _leave(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(number)
