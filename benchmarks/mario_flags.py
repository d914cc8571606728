"""Counts the episodes of Super Mario Bros in which the greedy policy of a run reaches the flag.

    python benchmarks/mario_flags.py runs/NAME --episodes 10 --noop-max 30

Every episode starts with 0 to `--noop-max` steps without a button, a random number of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echelon.algorithms.model import Model, Policy
from echelon.envs.make import probe_spaces
from echelon.envs.mario import MarioPool
from echelon.runs.checkpoint import find_weights
from echelon.runs.folder import RunFolder


def play(run: str, episodes: int, noop_max: int, seed: int) -> list[dict[str, Any]]:
    """Plays the episodes together; returns the last `info` and the return of each."""
    config = RunFolder.open(Path(run)).load_config(trust=False)
    model = Model(config.network, probe_spaces(config.env), config.algorithm, seed=config.seed)
    model.load_weights(find_weights(run), run)
    model.network.eval()
    policy, rng = Policy(model), torch.Generator().manual_seed(seed)
    stage = str(config.env.id).partition("-")[2] or None
    envs = MarioPool(episodes, **{"stage": stage, **config.env.kwargs, "noop_max": noop_max})
    observation, _ = envs.reset(seed=seed)
    state = model.network.initial_state(episodes, model.device)
    ended: dict[int, dict[str, Any]] = {}
    returns, first = np.zeros(episodes), torch.ones(episodes, dtype=torch.bool)
    while len(ended) < episodes:
        chosen = policy.act(torch.from_numpy(observation), state, first, rng, greedy=True)
        state = chosen.state
        observation, reward, terminated, truncated, info = envs.step(chosen.action.numpy())
        first = torch.zeros(episodes, dtype=torch.bool)
        for i in range(episodes):
            if i not in ended:
                returns[i] += reward[i]
                if terminated[i] or truncated[i]:
                    ended[i] = {"flag": bool(info["flag_get"][i]), "x_pos": int(info["x_pos"][i]), "return": returns[i]}
    envs.close()
    return [ended[i] for i in range(episodes)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the run folder")
    parser.add_argument("--episodes", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--noop-max", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    options = parser.parse_args()
    found = play(options.run, options.episodes, options.noop_max, options.seed)
    for episode in found:
        print(episode)
    print(f"{sum(episode['flag'] for episode in found)} of {len(found)} episodes reach the flag")
    return 0


if __name__ == "__main__":
    sys.exit(main())
