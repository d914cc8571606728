"""Buffers and servers of a world whose host is gone: the errors of the members that keep using them.

python world_alone.py HOW: four members, forks of this process. Rank 0, the host, is killed or fails once all have used
each operation; the others repeat each until it raises. Each prints a line of JSON: its name, operation -> type and text
of the error, and the members that its buffers declare lost.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from echelon.errors import EchelonError
from echelon.servers import (
    DistributedBuffer,
    DistributedEpisodeBuffer,
    DistributedPrioritizedBuffer,
    OrderedServer,
    OrderedServerImpl,
    PushPullGradServer,
    PushPullGradServerImpl,
    PushPullModelServer,
)
from echelon.world import RpcGroup, World

SIZE = 4
TIMEOUT_S = 60.0
DEADLINE_S = 40.0  # until an operation must have raised: before any timeout
HOME = "m1"  # the servers are in this member: it outlives the host
REDUCERS = [HOME, "m2"]
Operations = dict[str, Callable[[], Any]]


def transition(number: float) -> dict[str, Any]:
    state = {"state": torch.full((1, 2), number)}
    return {"state": state, "action": state, "next_state": state, "reward": number, "terminal": False}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def buffers_in(group: RpcGroup) -> tuple[Operations, Callable[[], dict[str, str]]]:
    """Returns a member's buffer operations, and the members that its buffers declare lost."""
    plain = DistributedBuffer("plain", group, 100)
    weighed = DistributedPrioritizedBuffer("weighed", group, 100)
    episodes = DistributedEpisodeBuffer("episodes", group, 10, 100)
    for number in range(4):
        plain.append(transition(number))
        weighed.append(transition(number))
        episodes.append([transition(number)])
    group.barrier()
    drawn = weighed.sample_batch(8)
    operations: Operations = {
        "all_size": plain.all_size,
        "sample_batch": lambda: plain.sample_batch(8),
        "sample_batch, weighed": lambda: weighed.sample_batch(8),
        "update_priority": lambda: weighed.update_priority(torch.ones(drawn.size), drawn.indexes or {}),
        "sample_batch, episodes": lambda: episodes.sample_batch(4),
        "all_clear": episodes.all_clear,
    }
    return operations, lambda: plain.lost | weighed.lost | episodes.lost


def servers_in(group: RpcGroup) -> Operations:
    """Returns a member's operations on servers that are in another member than the host, or in itself."""
    is_home = group.get_cur_name() == HOME
    ordered = OrderedServerImpl("ordered", group) if is_home else OrderedServer("ordered", group)
    settings: Any = {"primary_reducer": HOME, "secondary_reducers": REDUCERS}
    impl = PushPullGradServerImpl("gradients", group, **settings) if group.get_cur_name() in REDUCERS else None
    if impl is not None and is_home:
        managed = net()
        impl.manage_model(managed, torch.optim.SGD(managed.parameters(), lr=0.1))
    if impl is not None:
        impl.start()
    group.barrier()
    models, model = PushPullModelServer("model", ordered), net()
    distant = PushPullGradServer("gradients", group, secondary_reducers=REDUCERS)
    gradients = distant if impl is None else impl.accessor

    def push_gradient() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        gradients.push(model, pull=False)

    return {
        "push": lambda: ordered.push("key", 1, 1, 0),
        "pull": lambda: ordered.pull("key"),
        "push of a model": lambda: models.push(model),
        "pull of a model": lambda: models.pull(model),
        "push of gradients": push_gradient,
        "pull of weights": lambda: gradients.pull(model),
        "stats": gradients.stats,
        "watch": gradients.watch,
    }


def error_of(operation: Callable[[], Any]) -> tuple[str, str]:
    """Returns the type and text of the error that `operation` finally raises."""
    deadline = time.monotonic() + DEADLINE_S
    try:
        while time.monotonic() < deadline:
            operation()
            time.sleep(0.001)
    except EchelonError as error:
        return type(error).__name__, str(error)
    return "nothing", f"it went on for {DEADLINE_S:g} s"


def run(rank: int, how: str) -> None:
    world = World(f"m{rank}", rank, SIZE, timeout_s=TIMEOUT_S)
    group = world.create_rpc_group("all", world.members)
    operations, lost = buffers_in(group)
    operations |= servers_in(group)
    for operation in operations.values():
        operation()
    past = threading.Semaphore(0)
    if rank == 0:
        group.register("past the barrier", past.release)
    group.barrier()
    if rank != 0:
        group.registered_async("past the barrier")  # nobody waits for the reply of a process that ends
    else:
        for _ in range(1, SIZE):
            assert past.acquire(timeout=TIMEOUT_S), "all have left the barrier"
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("it broke")
    errors = {name: error_of(operation) for name, operation in operations.items()}
    os.write(1, f"{json.dumps([world.name, errors, lost()])}\n".encode())
    world.stop()


def main(how: str) -> int:
    children = []
    for rank in range(SIZE):
        child = os.fork()
        if child == 0:
            run(rank, how)
            return 0
        children.append(child)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children[1:])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
