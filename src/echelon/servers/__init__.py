"""Servers that run in the members of a world: versioned values, shared models, gradient servers, buffers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.servers.buffer import DistributedBuffer as DistributedBuffer
    from echelon.servers.buffer_episodes import DistributedEpisodeBuffer as DistributedEpisodeBuffer
    from echelon.servers.buffer_prioritized import DistributedPrioritizedBuffer as DistributedPrioritizedBuffer
    from echelon.servers.gradient import PushPullGradServer as PushPullGradServer
    from echelon.servers.gradient_member import PushPullGradServerImpl as PushPullGradServerImpl
    from echelon.servers.model import PushPullModelServer as PushPullModelServer
    from echelon.servers.model import PushPullModelServerImpl as PushPullModelServerImpl
    from echelon.servers.ordered import OrderedServer as OrderedServer
    from echelon.servers.ordered import OrderedServerImpl as OrderedServerImpl
    from echelon.servers.ordered import OrderedServerSimple as OrderedServerSimple
    from echelon.servers.ordered import OrderedServerSimpleImpl as OrderedServerSimpleImpl
    from echelon.servers.starting import grad_server_helper as grad_server_helper
    from echelon.servers.starting import model_server_helper as model_server_helper

LATE = {
    "DistributedBuffer": "buffer",
    "DistributedEpisodeBuffer": "buffer_episodes",
    "DistributedPrioritizedBuffer": "buffer_prioritized",
    "OrderedServer": "ordered",
    "OrderedServerImpl": "ordered",
    "OrderedServerSimple": "ordered",
    "OrderedServerSimpleImpl": "ordered",
    "PushPullGradServer": "gradient",
    "PushPullGradServerImpl": "gradient_member",
    "PushPullModelServer": "model",
    "PushPullModelServerImpl": "model",
    "grad_server_helper": "starting",
    "model_server_helper": "starting",
}
__all__ = list(LATE)


def __getattr__(name: str) -> Any:
    """Imports a public name on first use: roles and users need different modules of this package."""
    if name in LATE:
        return getattr(import_module(f"echelon.servers.{LATE[name]}"), name)
    raise AttributeError(f"module 'echelon.servers' has no attribute {name!r}")
