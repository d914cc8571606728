"""The exits of processes that an engine started and a node talks with: roles of a run, of a host, members of a launch.

What an exit means is for the caller to decide. A run replaces the role, a host agent reports it to the head, and
`launch` ends the world: the state of a member is its user's, and it is gone.
"""

from __future__ import annotations

from echelon.engines.process import Engine, Exit
from echelon.world.node import Node


def take_exits(engine: Engine, node: Node) -> list[Exit]:
    """The processes that ended since the last call: what each sent last is served, and `node` has forgotten it."""
    exits = engine.exits()
    if exits:
        node.drain()
    for gone in exits:
        node.forget(gone.name, gone.cause)
    return exits
