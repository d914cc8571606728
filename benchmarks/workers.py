"""Runs many workers against one learner on one machine; measures the learner's load and the handling time of episodes.

python benchmarks/workers.py --workers 32 --seconds 120
python benchmarks/workers.py --learner HOST:PORT --workers 32      # workers alone, for a learner elsewhere

Every worker is a process with one environment that sleeps 10 ms per step, like a remote simulator, and sends episodes
of 1,000 steps of 164 numbers; the learner has a network of 256 and 256 units. The figures are those of "Extending
Learn-to-Race with distributed deep RL" (64 workers there: 1,420,000 interactions per hour, learner utilisation 42 %,
mean handling time 280 ms). The handling time, measured by the learner, is from the receipt of a message to its reply;
the round trip is measured by a worker. The learner must have counted every episode that was acknowledged to a worker.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import echelon
from echelon.asynchronous.learner import AsyncLearningNode
from echelon.asynchronous.worker import AsyncWorker
from echelon.bench.harness import hardware
from echelon.config import replace

SLEEPY = f"{Path(__file__).resolve().parent / 'sleepy.py'}:Sleepy"
PAPER = {"workers": 64, "interactions_per_hour": 1_420_000, "utilisation": 0.42, "handling_mean_ms": 280.0}


def fork_worker(address: str, index: int) -> tuple[int, int]:
    """Forks a worker; returns its pid, and the descriptor of the pipe from which its account can be read."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    code = 1
    try:
        os.nice(10)  # it simulates another machine, which takes no time from the learner
        os.close(reader)
        with open(os.devnull, "w") as quiet:
            worker = AsyncWorker(address, seed=index, trust_learner=True, output=quiet)
            episodes = worker.work()
        account = {"episodes": episodes, "round_trips_s": list(worker.connection.round_trips)}
        with open(writer, "w") as pipe:
            json.dump(account, pipe)
        code = 0
    finally:
        os._exit(code)  # skips the parent's cleanup


def read_accounts(children: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Returns the accounts of the workers after they have ended; a failed worker has none."""
    texts = {reader: b"" for _, reader in children}
    waiting = set(texts)
    while waiting:
        for reader in select.select(list(waiting), [], [])[0]:
            data = os.read(reader, 1 << 16)
            texts[reader] += data
            if not data:
                waiting.discard(reader)
                os.close(reader)
    for pid, _ in children:
        os.waitpid(pid, 0)
    return [json.loads(text) for text in texts.values() if text]


def make_node(options: argparse.Namespace, run_dir: Path) -> AsyncLearningNode:
    changes: dict[str, Any] = {
        "env.kwargs": {"sleep_s": options.sleep_s, "length": options.length, "size": 164},
        "network.hidden": (256, 256),
        "algorithm.dueling": False,
        "learner.threads": 1,
    }
    config = replace(echelon.preset("dqn", SLEEPY), **changes)
    node = AsyncLearningNode(
        config, epochs=1 << 40, buffer_size=1_000_000, server_address=("127.0.0.1", 0), run_dir=run_dir
    )
    node.config = replace(node.config, **{"stop.episodes": 0, "stop.minutes": options.seconds / 60})
    return node


def report(summary: dict[str, Any], accounts: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    workers, shares = summary["workers"], summary["time"]["learner"]
    sent = sum(account["episodes"] for account in accounts)
    trips = np.array(
        [1e3 * trip for account in accounts for trip in account["round_trips_s"][2:]]
    )  # without the first two, of the registration
    p50, p95 = np.percentile(trips, (50, 95)) if len(trips) else (0.0, 0.0)
    return {
        "workers": options.workers,
        "workers_failed": options.workers - len(accounts),
        "seconds": options.seconds,
        "length": options.length,
        "sleep_s": options.sleep_s,
        "interactions_per_hour": workers["interactions_per_hour"],
        "utilisation": 1.0 - shares["wait"],
        **{name: workers.get(name) for name in ("handling_mean_ms", "handling_p95_ms", "handling_max_ms")},
        "round_trip_p50_ms": float(p50),
        "round_trip_p95_ms": float(p95),
        "episodes_sent": sent,
        "episodes_received": workers["episodes"],
        "episodes_lost": sent - workers["episodes"],
        "messages_repeated": workers["repeated"],
        "updates": summary["updates"],
        "hardware": hardware(),
        "paper": PAPER,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--length", type=int, default=1000, help="steps per episode")
    parser.add_argument("--sleep-s", type=float, default=0.01, help="duration of a step")
    parser.add_argument("--learner", default="", help="HOST:PORT of a remote learner: only the workers run here")
    parser.add_argument("--output", default="", help="write the figures to this file as JSON")
    options = parser.parse_args()
    if options.learner:
        accounts = read_accounts([fork_worker(options.learner, index) for index in range(options.workers)])
        print(json.dumps({"workers": len(accounts), "episodes_sent": sum(a["episodes"] for a in accounts)}))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        node = make_node(options, Path(folder) / "run")
        address = f"{node.address[0]}:{node.address[1]}"
        children = [fork_worker(address, index) for index in range(options.workers)]
        result = node.learn()
        figures = report(result.summary, read_accounts(children), options)
    text = json.dumps(figures, indent=2)
    print(text)
    if options.output:
        Path(options.output).write_text(text + "\n")
    return 0 if figures["episodes_lost"] == 0 and not figures["workers_failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
