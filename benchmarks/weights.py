"""How long new weights take to another host, compared with the time that the link needs for their bytes.

    python benchmarks/weights.py [--mbit 1000] [--units 3100] [--versions 10]

A training with two layers of `--units` runs on two hosts, which are network namespaces (see hosts.py). The times when
a version is complete on the board of the head and on that of the other host are read from their shared memory. Only
versions are counted that were published while no other was on the link.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from hosts import HEAD, PATIENCE_S, SECRET, two_hosts

LOOK_S = 0.002
BUFFERS = 3  # of a board
WORDS_BYTES = 128  # before its buffers


def board(folder: Path) -> Path:
    """Returns the file of the board in the session below `folder`, when it is there."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := list(folder.glob("echelon-*/weights"))):
        if time.monotonic() > deadline:
            raise SystemExit(f"no board in {folder}")
        time.sleep(0.1)
    return found[0]


def watch(near: Path, far: Path, versions: int) -> list[float]:
    """Returns the seconds from board to board of `versions` versions."""
    words = [np.memmap(path, np.int64, "r", shape=(1,)) for path in (near, far)]
    published, arrived, took = dict[int, float](), 0.0, list[float]()
    last = [0, 0]
    deadline = time.monotonic() + 20.0 * PATIENCE_S
    while len(took) < versions and time.monotonic() < deadline:
        now = time.monotonic()
        seen = [int(one[0]) for one in words]
        if seen[0] > last[0]:
            published[seen[0]] = now
        if seen[1] > last[1]:
            began = published.get(seen[1])
            if began is not None and began > arrived:
                took.append(now - began)
                print(f"version {seen[1]}: {took[-1]:.3f} s", flush=True)
            arrived = now
        last = seen
        time.sleep(LOOK_S)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--units", type=int, default=3100)
    parser.add_argument("--versions", type=int, default=10)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="echelon-weights-"))
    memories = [Path(tempfile.mkdtemp(prefix=f"echelon-{name}-", dir="/dev/shm")) for name in ("head", "other")]
    environment = {**os.environ, "ECHELON_SECRET": SECRET}
    echelon = (sys.executable, "-m", "echelon.cli.main")
    started: list[subprocess.Popen[bytes]] = []
    with two_hosts(arguments.mbit) as (head, other), (folder / "output").open("w") as output:
        train = ["train", "impala", "CartPole-v1", "--minutes=30", "--evaluation.episodes=0", "--acting=local"]
        train += [f"--network.hidden={arguments.units},{arguments.units}", "--actors=2", "--envs-per-actor=64"]
        train += ["--engine=hosts", "--hosts=2", f"--hosts.address=tcp://{HEAD}:7000", f"--run-dir={folder}/run"]
        train += [f"--shm-dir={memories[0]}", "--run.checkpoint-interval-s=3600"]
        join = ["host", f"--join={HEAD}:7000", "--name=other", f"--shm-dir={memories[1]}"]
        try:
            for words in ([*head, *echelon, *train], [*other, *echelon, *join]):
                started.append(subprocess.Popen(words, stdout=output, stderr=output, env=environment))
            near, far = (board(memory) for memory in memories)
            took = watch(near, far, arguments.versions)
            nbytes = (near.stat().st_size - WORDS_BYTES) // BUFFERS
        finally:
            for process in started:
                process.send_signal(signal.SIGINT)
            for process in started:
                process.wait(PATIENCE_S)
            for memory in memories:
                memory.rmdir()
    if not took:
        raise SystemExit((folder / "output").read_text())
    link_s = 8.0 * nbytes / (1e6 * arguments.mbit)
    median_s = statistics.median(took)
    print(f"{nbytes / 1e6:.1f} MB of weights, {arguments.mbit} Mbit/s: the link needs {link_s:.3f} s")
    print(f"board to board: median {median_s:.3f} s = {median_s / link_s:.2f} times, of {len(took)} versions")


if __name__ == "__main__":
    main()
