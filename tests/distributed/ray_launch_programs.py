"""Launches on a Ray cluster of two nodes, which end in some way: python ray_launch_programs.py HOW.

Writes one line of JSON: what the launch returned, or the error that it raised.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from echelon.errors import EchelonError
from echelon.world import World, get_world, launch


def name() -> str:
    world = get_world()
    assert world is not None
    return world.name


def actor_of_ray() -> int:
    """The parent of the fork server that started this process."""
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])


def end(world: World, how: str) -> Any:
    """The ranks 0 and 1 are on the launcher's node; rank 3 ends in some way while the others wait."""
    group = world.create_rpc_group("all", world.members)
    called = [group.rpc_sync(member, name) for member in world.members]
    ring = world.create_collective_group(world.get_ranks())
    total = torch.tensor(float(world.rank))
    ring.all_reduce(total)
    print(f"{world.name} prints", flush=True)
    group.barrier()
    if how == "return":
        return {
            "called": called,
            "total": total.item(),
            "network": os.readlink("/proc/self/ns/net"),
            "pids": [os.getpid(), actor_of_ray()],
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }
    if world.rank == 3:
        if how == "raise":
            raise ValueError("it broke")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "kill the actor":
            os.kill(actor_of_ray(), signal.SIGKILL)
    if how == "stay":
        print("all stay", flush=True)
        threading.Event().wait()
    group.barrier()
    return None


def told(how: str) -> Any:
    try:
        return launch(end, 4, (how,), engine="ray", address="auto")
    except EchelonError as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    print(json.dumps(told(sys.argv[1])), flush=True)
