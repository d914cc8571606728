"""Ours: two processes of a world, of which one calls a service of the other."""

from __future__ import annotations

from pathlib import Path

import torch

from echelon.bench.world.pair import ADDRESS, NAMES
from echelon.bench.world.setting import Setting
from echelon.bench.world.turn import Future, echo, measure
from echelon.world import RpcGroup, World
from echelon.world.watch import NONCE

KEY = "echo"
TIMEOUT_S = 600.0


def attend(name: str, folder: str, setting: Setting) -> dict[str, float]:
    """What either of the two does; the callee waits in a barrier while its threads answer."""
    world = enter(name, folder, setting)
    try:
        group = world.create_rpc_group("bench", NAMES)
        if name == NAMES[1]:
            group.register(KEY, echo)
        group.barrier()
        figures = measure(setting, WorldCaller(group)) if name == NAMES[0] else {}
        group.barrier(TIMEOUT_S)
    except BaseException:
        world.end(f"{name!r} failed")
        raise
    world.stop()
    return figures


def enter(name: str, folder: str, setting: Setting) -> World:
    """The world of the two: as processes of one host find each other, or as if they were on two."""
    if setting.transport == "local":
        return World(name, NAMES.index(name), world_size=2)
    address = (Path(folder) / ADDRESS).read_text()
    world = World(name, NAMES.index(name), world_size=2, address=address)
    (Path(world._card.folder) / NONCE).unlink()  # by which the other would see that they share memory
    return world


class WorldCaller:
    """Calls the callee through a group."""

    def __init__(self, group: RpcGroup) -> None:
        self._group = group

    def call(self, tensor: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self._group.registered_sync(KEY, (tensor,))
        return value

    def begin(self, tensor: torch.Tensor) -> Future:
        return self._group.registered_async(KEY, (tensor,))
