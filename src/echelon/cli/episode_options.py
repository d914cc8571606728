"""The options of `echelon eval` and `echelon play` for the episodes of a run."""

from __future__ import annotations

import argparse
from typing import Any

from echelon.cli.main import Parser, add_trust, parse_env_kwargs


def add_options(parser: Parser, episodes: int) -> None:
    """Adds the run and the options; `episodes` is the default of --episodes."""
    parser.add_argument("run", metavar="RUN", help="the run folder, or RUN/checkpoints/NAME")
    parser.add_argument(
        "--checkpoint", default="newest", metavar="NAME", help="newest (default), best, or another of RUN/checkpoints"
    )
    text = f"number of episodes (default {episodes})"
    parser.add_argument("--episodes", type=int, default=episodes, metavar="N", help=text)
    text = "seed of the environments and of sampling (default 1)"
    parser.add_argument("--seed", type=int, default=1, metavar="S", help=text)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--greedy", action="store_true", help="play the most likely actions (default)")
    choice.add_argument("--sample", action="store_true", help="sample actions and explore, as at the end of training")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="cut episodes after N steps (default: never)")
    parser.add_argument(
        "--env", metavar="ENV", help="environment in place of the run's: an id, module:factory or envpool:ID"
    )
    parser.add_argument(
        "--env-kwargs",
        metavar="JSON",
        default="{}",
        help="keyword arguments for the environment; they are added to the run's, or replace them; an --env other than "
        "a stage or version of the run's drops the run's",
    )
    add_trust(parser)


def arguments_of(known: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments that `evaluate` and `play` have in common."""
    return {
        "run_dir": known.run,
        "episodes": known.episodes,
        "seed": known.seed,
        "greedy": not known.sample,
        "steps": known.steps,
        "checkpoint": known.checkpoint,
        "env": known.env,
        "env_kwargs": parse_env_kwargs(known.env_kwargs),
        "trust": known.trust,
    }
