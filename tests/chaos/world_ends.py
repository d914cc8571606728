"""Worlds whose host is killed: the errors of the members that wait.

python world_ends.py host: four members, forks of this process. Rank 0, the host, kills itself while they wait; each of
them prints a line of JSON: its name, and the type and text of its error.
python world_ends.py launcher: the launched processes print their pids and wait forever.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable

import torch

from echelon.errors import EchelonError
from echelon.world import RpcGroup, World, launch

TIMEOUT_S = 60.0
DELAY_S = 0.2  # sound whatever it is


def wait_for_ever() -> None:
    threading.Event().wait()


def kills_itself(world: World, group: RpcGroup) -> None:
    threading.Timer(DELAY_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
    wait_for_ever()


def waits_in_a_barrier(world: World, group: RpcGroup) -> None:
    world.create_collective_group([1, 3])
    group.barrier()


def waits_in_a_call(world: World, group: RpcGroup) -> None:
    """The callee is not the host: it could continue, but its death would not be reported."""
    group.rpc_sync("m1", wait_for_ever)


def waits_in_a_collective(world: World, group: RpcGroup) -> None:
    world.create_collective_group([1, 3]).all_reduce(torch.zeros(1))


PARTS: list[Callable[[World, RpcGroup], None]] = [
    kills_itself,
    waits_in_a_barrier,
    waits_in_a_call,
    waits_in_a_collective,
]


def run(rank: int) -> None:
    world = World(f"m{rank}", rank, len(PARTS), timeout_s=TIMEOUT_S)
    try:
        PARTS[rank](world, world.create_rpc_group("all", world.members))
    except EchelonError as error:
        os.write(1, f"{json.dumps([world.name, type(error).__name__, str(error)])}\n".encode())
    world.stop()


def launched(world: World) -> None:
    group = world.create_rpc_group("all", world.members)
    os.write(1, f"{os.getpid()}\n".encode())
    if world.rank:
        group.barrier()
    wait_for_ever()


def main(what: str) -> int:
    if what == "launcher":
        launch(launched, 3)
        return 0
    children = []
    for rank in range(len(PARTS)):
        child = os.fork()
        if child == 0:
            run(rank)
            return 0
        children.append(child)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children[1:])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
