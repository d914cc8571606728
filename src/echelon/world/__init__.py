"""The world: named processes that call each other, form groups and detect each other's death.

A call passes through these modules, from the caller to the callee and back:

    world, rpc_group        the user's API: World, and the groups that it creates
    membership              this process as a member: joining, deaths of others, the end of the world, leaving
    switchboard             the channel between each caller and callee, opened at the first call
    (transport.channel_*)   the channel: `calls` and `callee` are its two sides, `ends` connects hosts
    (transport.lines)       the channel between processes of one host, in shared memory
    functions               what others may call: the program's own functions, and values and services with a key

Besides calls, every process has a node of the control plane, over ZeroMQ. It holds the list of members:

    endpoint, address       sockets, and the addresses where they may bind
    messages, directory     requests and replies; names and their members
    node                    a member of the control plane: joins, sends requests, replies; has no thread
    node_thread             the thread that polls the node of a World; training runs poll their nodes themselves
    watch                   which members are on this host, and which have died
    registry                the host's tables: ranks, groups, keys, barriers, whether the world has ended
    entrance                how a process finds the host of its world, or becomes it

    launching, launched     `launch`, and what its processes do
    collective_group        tensor operations among some ranks; uses operation, process_group, store and store_table
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
    """Imports a public name on first use: roles need only the control plane, which needs few of these modules."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
