"""Functions that the tests of `launch` run in the processes it starts; as a script: launches that end in every way.

python launch_programs.py: launches functions of this script, which is then `__main__`, and writes JSON: the way to end
-> what the launch returned or raised, and how many processes and folders it left behind.
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
from running import MARK, processes_marked

ENDS = (
    "return",
    "raise",
    "kill",
    "kill the fork server",
    "leave at once",
    "exit with 3",
    "return what cannot be sent",
    "exit",
    "exit at the start",
)


def name() -> str:
    world = get_world()
    assert world is not None
    return world.name


def wait_for_ever() -> None:
    threading.Event().wait()


def must_hear_of_the_host(world: World) -> bool:
    return world._beats


def tell(world: World, tensor: torch.Tensor, words: dict[str, Any]) -> Any:
    """Rank 0 returns immediately, and can still be called; rank 1 calls `stop` itself."""
    group = world.create_rpc_group("all", world.members)
    told = (world.rank, world.name, world.members, world.world_size, float(tensor.sum()), words)
    group.barrier()  # no member leaves before all have looked
    if world.rank == 2:
        assert group.rpc_sync(world.name_of(0), name) == world.name_of(0)
    if world.rank:
        world.create_rpc_group("ranks 1 and 2", [world.name_of(1), world.name_of(2)])  # both know the members
    if world.rank == 1:
        world.stop()
        assert get_world() is None
    return told


def hear(world: World, file: str) -> None:
    """Rank 1 fails while the others wait for it; they write the error that they receive to `file` and their rank."""
    group = world.create_rpc_group("all", world.members)
    if world.rank == 1:
        group.barrier()
        raise ValueError("it broke")
    try:
        group.barrier()  # the end of the world may arrive first here, too
        group.barrier()
    except BaseException as error:
        Path(f"{file}{world.rank}").write_text(f"{type(error).__name__}: {error}")
        raise


def end(world: World, how: str) -> Any:
    """Rank 1 ends in some way while the others wait in different ways."""
    if how == "exit at the start" and world.rank == 1:
        sys.exit(0)
    group = world.create_rpc_group("all", world.members)
    if how == "return":
        names = [group.rpc_sync(member, name) for member in world.members]
        group.barrier()
        return names
    ring = world.create_collective_group([0, 1]) if world.rank < 2 else None
    group.barrier()
    if ring is not None and world.rank == 0:
        ring.all_reduce(torch.zeros(1))
    elif world.rank == 2:
        group.rpc_sync(world.name_of(3), wait_for_ever)
    elif world.rank == 3:
        group.barrier()
    return end_by(how)


def end_by(how: str) -> Any:
    if how == "return what cannot be sent":
        return {1, 2}
    if how == "raise":
        raise ValueError("it broke")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "kill the fork server":
        os.kill(os.getppid(), signal.SIGKILL)
        wait_for_ever()
    if how == "leave at once":
        os._exit(0)
    sys.exit(3 if how == "exit with 3" else 0)


def outcome_of(how: str) -> tuple[str, int, int]:
    try:
        told = str(launch(end, 4, (how,)))
    except EchelonError as error:
        told = f"{type(error).__name__}: {error}"
    left = set(processes_marked(os.environ[MARK])) - {os.getpid()}
    return told, len(left), len(list(Path("/dev/shm").glob(f"echelon-{os.getpid()}-*")))


if __name__ == "__main__":
    print(json.dumps({how: outcome_of(how) for how in ENDS}))
