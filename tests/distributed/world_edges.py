"""One of two members of a world, as a plain process: python world_edges.py RANK HOW.

Rank `WHO[HOW]` leaves in that way; the other waits for it and prints a line of JSON: the type and text of its error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from echelon.errors import EchelonError, WorldStopped
from echelon.world import World
from echelon.world.store import WorldStore

WHO = {
    "exits in a block": 0,
    "raises SystemExit in a block": 1,
    "exits": 1,
    "ends the world": 1,
    "raises": 0,
    "raises in a block": 0,
    "dies while it connects": 1,
}


def leave(world: World, how: str) -> None:
    if how.startswith("exits"):
        exit(0)
    if how.startswith("raises SystemExit"):
        raise SystemExit
    if how == "ends the world":
        world.end("it is solved")
        sys.exit(0)
    raise ValueError("it broke")


def go(world: World, how: str) -> None:
    if "block" in how:
        with world:
            leave(world, how)
    elif how == "dies while it connects":
        WorldStore.set = set_and_die  # type: ignore[method-assign]
    else:
        leave(world, how)


def main(rank: int, how: str) -> None:
    world = World(f"m{rank}", rank, 2, timeout_s=60.0)
    group = world.create_rpc_group("all", world.members)
    if rank == WHO[how]:
        group.barrier()
        go(world, how)
    try:
        if rank != WHO[how]:
            group.barrier()  # the end of the world may arrive first here, too
        if how == "dies while it connects":
            world.create_collective_group([0, 1])
        else:
            group.barrier()
    except (EchelonError, WorldStopped) as error:
        print(json.dumps((type(error).__name__, str(error))), flush=True)


def set_and_die(store: WorldStore, key: str, value: Any) -> None:
    """All members have joined and gloo has started to exchange addresses, but the last one is missing."""
    if "/here/" not in key:
        os.kill(os.getpid(), signal.SIGKILL)
    store._ask("set", key, value.encode() if isinstance(value, str) else bytes(value))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
