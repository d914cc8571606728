"""World, the user's API of the world that a process belongs to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from echelon.errors import ConfigError, WorldError
from echelon.world.entrance import Entrance
from echelon.world.membership import Membership, membership_here
from echelon.world.rpc_group import RpcGroup, enter_rpc_group
from echelon.world.watch import MemberInfo

if TYPE_CHECKING:
    from echelon.world.collective_group import CollectiveGroup

# Keyword arguments of Machin's World that have no effect here.
UNUSED = {"dist_timeout", "init_dist", "init_rpc", "dist_backend", "dist_init_method", "rpc_init_method"}


def get_world() -> World | None:
    """Returns the World of this process, or None."""
    here = membership_here()
    return here if isinstance(here, World) else None


def get_cur_rank() -> int:
    """Returns the rank of this process in its world."""
    return world_here("get_cur_rank").rank


def get_cur_name() -> str:
    """Returns the name of this process in its world."""
    return world_here("get_cur_name").name


def world_here(caller: str) -> World:
    """Returns the World of this process; raises a WorldError that names `caller` if there is none."""
    world = get_world()
    if world is None:
        raise WorldError(f"{caller}: this process is in no world. Create a World, or start the program with launch().")
    return world


class World(Membership):
    """This process as a member of a world, created by `launch` or by the user in each process.

    Without `launch`, every process creates a World with its `rank` and the same `world_size`. The constructor returns
    when all ranks have joined. Rank 0 is the host. Without an `address`, the children of one process find each other;
    with the address of rank 0, "tcp://HOST:PORT", processes anywhere do. A process with rank -1 joins the world at
    `address` at any time. `with World(...) as world:` leaves at the end of the block; `exit(0)` inside the block ends
    the world for all members.

    Every wait is bounded: it ends with a reply, with TransportTimeout after `timeout_s` or the timeout of the call,
    with PeerLost if the awaited process dies, or with WorldStopped if a member ends the world. A process has at most
    one World. A World does not survive a fork.
    """

    def __init__(
        self,
        name: str,
        rank: int = -1,
        world_size: int = -1,
        address: str = "",
        timeout_s: float = 60.0,
        **keywords: Any,
    ) -> None:
        """`keywords` are Machin's: `rpc_timeout` is an alias of `timeout_s`, the others have no effect."""
        timeout_s = float(keywords.pop("rpc_timeout", timeout_s))
        if unknown := set(keywords) - UNUSED:
            raise TypeError(f"World() got an unexpected keyword argument {min(unknown)!r}")
        module = str(sys._getframe(1).f_globals.get("__name__", ""))
        super().__init__(Entrance(name, rank, world_size, address, timeout_s), module)

    @classmethod
    def launched(cls, entrance: Entrance, module: str) -> World:
        """Returns the World of a process that `launch` started to run a function of `module`."""
        world = cls.__new__(cls)
        Membership.__init__(world, entrance, module)
        return world

    # Members.

    @property
    def address(self) -> str:
        """The address at which others can join this world."""
        return self._node.host_address

    @property
    def members(self) -> list[str]:
        """The names of the current members, sorted."""
        return [name for name in self._node.members if (one := self._node.member(name)) and MemberInfo.of(one).size]

    def get_members(self) -> list[str]:
        """Returns the names of the current members, sorted."""
        return self.members

    def get_ranks(self) -> list[int]:
        """Returns the ranks of the world, sorted."""
        return list(range(self.world_size))

    def name_of(self, rank: int) -> str:
        """Returns the name of the member with that rank."""
        if not 0 <= rank < self.world_size:
            raise WorldError(f"there is no rank {rank} in this world: it has {self.world_size} ranks.")
        return self._ranked[rank]

    # Groups.

    def create_rpc_group(self, group_name: str, members: Sequence[str]) -> RpcGroup:
        """Creates a group of `members`, which include this process; returns when all of them have called this."""
        return enter_rpc_group(self, group_name, members)

    def create_collective_group(
        self, ranks: Sequence[int], timeout: float | None = None, backend: str | None = None
    ) -> CollectiveGroup:
        """Creates a group for torch.distributed operations among `ranks`; only those ranks call this.

        The default `backend` is gloo.
        """
        from echelon.world.collective_group import enter_collective_group

        hostname = self._hostname([self.name_of(rank) for rank in ranks])
        return enter_collective_group(self, ranks, self.seconds(timeout), backend or "gloo", hostname)

    def _hostname(self, names: Sequence[str]) -> str:
        """Returns the address at which the members `names` reach this host."""
        if all((one := self._node.member(name)) is None or MemberInfo.of(one).is_beside for name in names):
            return "127.0.0.1"
        if not self._node.address.startswith("tcp://"):
            raise ConfigError(
                f"{', '.join(names)} are on one host but in different networks, so they cannot have a collective "
                "group. Give the world an address, tcp://HOST:PORT, at which they reach each other."
            )
        return self._node.address.removeprefix("tcp://").rpartition(":")[0]

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._leave(error)
