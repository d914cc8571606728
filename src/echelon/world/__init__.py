"""The world: named processes that call each other, form groups and learn of each other's end.

A call goes through these modules, from the caller to the callee and back:

    world, rpc_group        what a program uses: World, and the groups that it creates
    membership              this process in the world: entering, being told of deaths and of the end, leaving
    switchboard             who calls whom by which form of the channel; opened at the first call
    (transport.channel_*)   the channel: `calls` and `callee` are its two sides, `ends` what is between hosts
    (transport.lines)       what is between processes of one host, in shared memory
    functions               what may be called there: the program's own functions, and what has a key

Beside the calls, every process has a node, for who is there and what the host keeps; ZeroMQ carries it:

    endpoint, address       sockets, and where they may be bound
    messages, directory     requests and their answers; names and the members behind them
    node                    a member of the control plane: joins, asks, answers, without a thread
    node_thread             the thread that runs it in a World; training runs poll their nodes themselves
    watch                   who is on this host, and who has died
    registry                what the host keeps: ranks, groups, keys, barriers, the end
    entrance                how a process finds the host, or becomes it

    launching, launched     `launch`, and what the processes that it starts do
    collective_group        tensors among some ranks, with operation, process_group, store and store_table
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from echelon.errors import RpcException, WorldStopped
    from echelon.world.collective_group import CollectiveGroup
    from echelon.world.launching import launch
    from echelon.world.rpc_group import RpcGroup
    from echelon.world.world import World, get_cur_name, get_cur_rank, get_world

__all__ = [
    "CollectiveGroup",
    "RpcException",
    "RpcGroup",
    "World",
    "WorldStopped",
    "get_cur_name",
    "get_cur_rank",
    "get_world",
    "launch",
]

_HOMES = {
    "CollectiveGroup": "echelon.world.collective_group",
    "RpcException": "echelon.errors",
    "RpcGroup": "echelon.world.rpc_group",
    "World": "echelon.world.world",
    "WorldStopped": "echelon.errors",
    "get_cur_name": "echelon.world.world",
    "get_cur_rank": "echelon.world.world",
    "get_world": "echelon.world.world",
    "launch": "echelon.world.launching",
}


def __getattr__(name: str) -> object:
    """Imports what is asked for: the control plane alone, which roles use, needs little of this."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
