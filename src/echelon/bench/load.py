"""Keeps cores busy with work like a training's, while a stage is measured on another core.

`python -m echelon.bench.load` prints `ready` and works until its standard input closes, so it never outlives its
parent.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import subprocess
import sys
from collections.abc import Iterator

LOOK_EVERY = 50  # rounds, some 50 ms


@contextlib.contextmanager
def loaded_cores(count: int) -> Iterator[None]:
    """Keeps `count` cores busy while the block runs."""
    command = [sys.executable, "-m", "echelon.bench.load"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    pipe = subprocess.PIPE
    workers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env) for _ in range(count)]
    try:
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()  # `ready`, or "" if it failed; its message is on stderr
        yield
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def _swing(count: int) -> float:
    """Computes plain Python arithmetic, like the step of an environment."""
    angle, speed = 0.1, 0.0
    for _ in range(count):
        speed += 0.02 * (9.8 * math.sin(angle) - 0.1 * math.cos(angle) * speed)
        angle = min(max(angle + 0.02 * speed, -1.0), 1.0)
    return angle


def main() -> None:
    import numpy as np
    import torch

    torch.set_num_threads(1)
    network = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh())
    rows, batch = torch.randn(32, 8), torch.randn(640, 8)
    slots = np.zeros((64, 32_768), np.float32)  # 8 MiB, to load the memory, too
    rounds = 0
    print("ready", flush=True)
    while True:
        _swing(500)
        with torch.inference_mode():
            network(rows)
        network(batch).square().mean().backward()
        np.copyto(slots[rounds % 64], slots[(rounds + 1) % 64])
        rounds += 1
        if rounds % LOOK_EVERY == 0 and select.select([sys.stdin], [], [], 0.0)[0]:
            return


if __name__ == "__main__":
    main()
