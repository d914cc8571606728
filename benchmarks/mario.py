"""Measures the environments of Super Mario Bros: what a step costs, and what threads gain.

    python benchmarks/mario.py                        # about half a minute
    python benchmarks/mario.py --seconds 2 --envs 8 --threads 1 2 4

A row is K games of `SuperMarioBros-1-1` with random actions of the set "right", preprocessed, resets included. The
limit is the emulator alone: four frames per step, without pictures, rewards or infos. Rates per CPU second do not
depend on other programs on the machine; those per second do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from echelon.envs.mario import ACTIONS as ACTION_SETS
from echelon.envs.mario import Mario, MarioPool, grey

STAGE, ACTIONS, SKIP = "1-1", "right", 4


class Rate(NamedTuple):
    """Calls per second, and per second of CPU time of this process."""

    per_s: float
    per_cpu_s: float


def measured(call: Callable[[], object], seconds: float, count: int = 1) -> Rate:
    """Repeats `call`, which counts `count` times, for `seconds`."""
    calls, started, cpu = 0, time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - started) < seconds:
        call()
        calls += count
    return Rate(calls / elapsed, calls / (time.process_time() - cpu))


def limit(seconds: float) -> Rate:
    """Returns the rate of the emulator alone."""
    env = Mario(STAGE, ACTIONS)
    env.reset(seed=0)

    def four_frames() -> None:
        for _ in range(SKIP):
            env.game.emulator.step(0)

    rate = measured(four_frames, seconds)
    env.close()
    return rate


def pool_rate(num_envs: int, num_threads: int, seconds: float) -> Rate:
    rng, pool = np.random.default_rng(0), MarioPool(num_envs, num_threads, stage=STAGE, actions=ACTIONS)
    pool.reset(seed=0)
    rate = measured(lambda: pool.step(rng.integers(len(ACTION_SETS[ACTIONS]), size=num_envs)), seconds, num_envs)
    pool.close()
    return rate


def parts(seconds: float) -> dict[str, float]:
    """Returns the CPU milliseconds of the parts of an episode other than its steps."""
    env = Mario(STAGE, ACTIONS)
    cpu = time.process_time()
    env.reset(seed=0)
    first_ms = 1e3 * (time.process_time() - cpu)
    for _ in range(100):
        env.step(0)
    state = env.get_state()
    costs = {
        "picture": 1e3 / measured(lambda: grey(env.game.emulator.screen), seconds).per_cpu_s,
        "first reset": first_ms,
        "reset": 1e3 / measured(env.reset, seconds).per_cpu_s,
        "set_state after 100 steps": 1e3 / measured(lambda: env.set_state(state), seconds).per_cpu_s,
    }
    env.close()
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--envs", type=int, default=4, help="games, K")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    rates = {"limit: the emulator alone": limit(options.seconds), "K=1": pool_rate(1, 1, options.seconds)}
    for threads in options.threads:
        name = f"K={options.envs}, {threads} thread{'s' * (threads > 1)}"
        rates[name] = pool_rate(options.envs, threads, options.seconds)
    for name, rate in rates.items():
        print(f"{name:26} {rate.per_s:7.0f} steps/s {rate.per_cpu_s:7.0f} steps per CPU second")
    for name, cost_ms in parts(options.seconds / 4).items():
        print(f"{name:26} {cost_ms:7.2f} ms")


if __name__ == "__main__":
    main()
