"""Measures push, pull, append and sample between processes, compared with a bare call of the same group.

There are three processes: 0 hosts the models and is the primary reducer, 0 and 1 store transitions, 2 is measured. All
measurements alternate, each after an uncounted bare call, and medians are reported, so that noise affects all of them.
`own` is the processor time of the calling thread. The networks are those of the examples: 4 inputs, 16 and 16 hidden
units, 2 outputs.

    python benchmarks/servers.py
    python benchmarks/servers.py --busy          # while 0 and 1 compute and append without a pause
    python benchmarks/servers.py --hidden 1024   # a million parameters
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from echelon.servers import (
    DistributedPrioritizedBuffer,
    OrderedServer,
    PushPullModelServer,
    grad_server_helper,
    model_server_helper,
)
from echelon.world import World, launch

BATCH = 50


def network(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def transition() -> dict[str, Any]:
    state, action = torch.zeros(1, 4), torch.zeros(1, 1, dtype=torch.int64)
    return {
        "state": {"state": state},
        "action": {"action": action},
        "next_state": {"state": state},
        "reward": 1.0,
        "terminal": False,
    }


def measured(world: World, rounds: int, is_busy: bool, hidden: int) -> dict[str, list[tuple[float, float]]]:
    """Returns wall and own processor seconds of every measurement in member 2; the other members serve."""
    (gradient_server,) = grad_server_helper([lambda: network(hidden)])
    (model_server,) = model_server_helper(1)
    group = world.create_rpc_group("benchmark", world.members)
    buffer = DistributedPrioritizedBuffer("benchmark", group, 100_000)
    if world.rank == 0:
        group.register("nothing", lambda: None)
    for _ in range(2000 if world.rank < 2 else 0):
        buffer.append(transition())
    group.barrier()
    if world.rank < 2:
        serve(world, buffer, network(hidden) if is_busy else None)
        return {}
    model, other, stale = network(hidden), network(hidden), transition()
    elsewhere = PushPullModelServer("model_0", OrderedServer("model_server", model_server.o_server.group))  # type: ignore[attr-defined]

    def sample_and_update() -> None:
        size, _, indexes, _ = buffer.sample_batch(BATCH)
        assert indexes is not None
        buffer.update_priority(np.ones(size), indexes)

    def push_gradient(pull: bool) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gradient_server.push(model, pull)

    measures: dict[str, Callable[[], Any]] = {
        "a bare call": lambda: group.registered_sync("nothing"),
        "model server: push": lambda: model_server.push(model),
        "model server: pull what is newer": lambda: elsewhere.pull(other),
        "model server: pull, nothing newer": lambda: elsewhere.pull(other),
        "gradient server: push": lambda: push_gradient(pull=False),
        "gradient server: push and pull": lambda: push_gradient(pull=True),
        "buffer: append": lambda: buffer.append(stale),
        f"buffer: sample {BATCH} of 3 members, update": sample_and_update,
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            group.registered_sync("nothing")  # so that no thread has just gone to sleep
            begin, own_begin = time.perf_counter(), time.thread_time()
            measure()
            seconds[name].append((time.perf_counter() - begin, time.thread_time() - own_begin))
    for member in ("0", "1"):
        group.registered_sync(f"finish/{member}")
    return seconds


def serve(world: World, buffer: DistributedPrioritizedBuffer, model: nn.Module | None) -> None:
    """Serves until member 2 has finished: asleep, or acting with `model` and appending."""
    finished: list[bool] = []
    buffer.group.register(f"finish/{world.name}", lambda: finished.append(True))
    item = transition()
    while not finished:
        if model is not None:
            with torch.no_grad():
                model(item["state"]["state"])
            buffer.append(item)
        else:
            time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1000, help="rounds of each measurement")
    parser.add_argument("--busy", action="store_true", help="members 0 and 1 compute and append all the time")
    parser.add_argument("--hidden", type=int, default=16, help="units of the two hidden layers")
    options = parser.parse_args()
    seconds = launch(measured, 3, (options.rounds, options.busy, options.hidden))[2]
    print(f"{'':44}{'median us':>10}{'p90 us':>10}{'own us':>10}")
    for name, found in seconds.items():
        whole, own = (np.array(column) * 1e6 for column in zip(*found, strict=True))
        print(f"{name:44}{np.median(whole):10.0f}{np.quantile(whole, 0.9):10.0f}{np.median(own):10.0f}")


if __name__ == "__main__":
    main()
