"""Counts the episodes of Super Mario Bros in which the policy of a run reaches the flag.

    python benchmarks/mario_flags.py runs/NAME --episodes 10 --noop-max 30

Every episode starts with 0 to `--noop-max` steps without a button, a random number of them. One that has not ended
after `--steps` steps counts as no flag: a greedy policy can stand in front of a pipe until its time is up.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from echelon.algorithms.model import Model
from echelon.config import replace
from echelon.envs.make import env_seeds, probe_spaces
from echelon.envs.mario import NAME, MarioPool
from echelon.errors import ConfigError
from echelon.roles.evaluator import EVALUATION_SEED, Match
from echelon.runs.checkpoint import NEWEST
from echelon.runs.folder import RunFolder
from echelon.runs.weights import read_weights, weights_path

PROGRESS_S = 10.0


class FlagPool(MarioPool):
    """Games that keep the info of the end of their first episode."""

    def __init__(self, num_envs: int, ends: dict[int, dict[str, Any]], **kwargs: Any) -> None:
        super().__init__(num_envs, **kwargs)
        self.ends = ends

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        row = super().step(actions)
        for i in row[2].nonzero()[0].tolist():
            self.ends.setdefault(i, self.envs[i].game.info())
        return row


def count_flags(run: str, options: argparse.Namespace) -> int:
    """Plays the episodes together and prints each of them; returns how many reach the flag."""
    config = RunFolder.open(Path(run)).load_config(trust=False)
    if not str(config.env.id).startswith(NAME):
        raise ConfigError(f"{run} trained {config.env.id}, not {NAME}.")
    model = Model(config.network, probe_spaces(config.env), config.algorithm, seed=config.seed)
    model.load_weights(read_weights(weights_path(run, options.checkpoint)), run)
    model.network.eval()
    ends: dict[int, dict[str, Any]] = {}
    stage, threads = str(config.env.id).partition("-")[2] or None, len(os.sched_getaffinity(0))
    kwargs = {"stage": stage, **config.env.kwargs, "noop_max": options.noop_max, "num_threads": threads, "ends": ends}
    env = replace(config.env, id=FlagPool, kwargs=kwargs)
    seeds = env_seeds(options.seed, EVALUATION_SEED + 1, 0, options.episodes)
    match = Match(env, model, options.episodes, seeds, greedy=not options.sample)
    with contextlib.closing(match):
        match.begin(options.seed)
        begun = shown = time.monotonic()
        for step in range(1, options.steps + 1):
            if match.step() is not None:
                break
            if time.monotonic() - shown >= PROGRESS_S:
                shown = time.monotonic()
                print(
                    f"{shown - begun:.0f} s: step {step:,}, {len(ends)} of {options.episodes} episodes ended",
                    flush=True,
                )
    for i in range(options.episodes):
        end = ends.get(i)
        what = "stuck" if end is None else "flag" if end["flag_get"] else f"ends at x={end['x_pos']:,}"
        print(f"episode {i + 1}: {what}, return {match.returns[i]:,.0f}, {match.lengths[i]:,} steps")
    return sum(end["flag_get"] for end in ends.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the run folder")
    parser.add_argument("--checkpoint", default=NEWEST, help="one of RUN/checkpoints (default: %(default)s)")
    for name, default in (("episodes", 10), ("noop-max", 30), ("seed", 1), ("steps", 1500)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--sample", action="store_true", help="sample actions (default: the most likely ones)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        print(f"{count_flags(options.run, options)} of {options.episodes} episodes reach the flag")
    except ConfigError as error:
        print(f"mario_flags: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
