"""Exits of processes that an engine started and that joined a node: roles of a run or a host, members of a launch.

The caller decides what an exit means. A run replaces the role, a host agent reports it to the head, and `launch` ends
the world, because the state of a member belongs to the user and is lost.
"""

from __future__ import annotations

from echelon.engines.process import Engine, Exit
from echelon.world.node import Node


def take_exits(engine: Engine, node: Node) -> list[Exit]:
    """Returns the exits since the last call, after serving the last messages and removing the processes from `node`."""
    exits = engine.exits()
    if exits:
        node.drain()
    for gone in exits:
        node.forget(gone.name, gone.cause)
    return exits
