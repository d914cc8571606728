"""Measures how fast two processes step CartPole-v1 without policy and learning: the limit of any trainer."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path

import gymnasium as gym

NUM_PROCESSES = 2


def step_alone(seconds: float) -> float:
    """Returns the steps per second of one environment with alternating actions, including resets."""
    environment = gym.make("CartPole-v1")
    environment.reset(seed=0)
    num_steps, started_s = 0, time.monotonic()
    while (elapsed_s := time.monotonic() - started_s) < seconds:
        for _ in range(1000):
            _, _, terminated, truncated, _ = environment.step(num_steps % 2)
            num_steps += 1
            if terminated or truncated:
                environment.reset()
    return num_steps / elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(NUM_PROCESSES) as pool:
        rates = pool.map(step_alone, [options.seconds] * NUM_PROCESSES, chunksize=1)
    options.result.write_text(json.dumps({"env_steps_per_s": sum(rates), "status": "finished"}) + "\n")


if __name__ == "__main__":
    main()
