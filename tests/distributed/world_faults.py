"""Programs about what must not go on for ever: a stopped peer, a dead owner, a dead process with unread answers."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from world_programs import PATIENCE_S, add, die, group_of

from echelon.errors import PeerLost, TransportTimeout
from echelon.world import World

LARGE = 1 << 20  # numbers: goes through a block of its own
PAUSE = threading.Event()


def make_large() -> torch.Tensor:
    return torch.ones(LARGE)


def call_while_another_thread_opens(world: World) -> Any:
    """The line to a stopped member is being opened: who comes after that waits no longer than it wants to."""
    group = group_of(world)
    if world.rank == 0:
        member = world._node.member("m1")
        assert member is not None
        os.kill(member.pid, signal.SIGSTOP)
        sums: list[int] = []
        first = threading.Thread(target=lambda: sums.append(group.rpc_sync("m1", add, args=(1,))))
        first.start()
        opening = world._switchboard._opening
        while "m1" not in opening or not opening["m1"].locked():
            PAUSE.wait(0.001)
        with pytest.raises(TransportTimeout, match=r"'m1' opened no line for 'm0' within 0\.1 s"):
            group.rpc_sync("m1", add, timeout=0.1, args=(1,))
        assert first.is_alive()
        os.kill(member.pid, signal.SIGCONT)
        first.join(PATIENCE_S)
        assert sums == [2]
    group.barrier()


def inherit_a_service(world: World) -> Any:
    """The owner of a key dies, and another member registers it: who remembers the dead one finds its successor."""
    group = group_of(world)
    if world.rank == 1:
        group.register("key", lambda: "m1")
        group.pair("value", "m1")
    group.barrier()
    told = [group.registered_sync("key"), group.get_paired("value").to_here()]
    group.barrier()
    if world.rank == 1:
        die()
    with pytest.raises(PeerLost, match="'m1'"):
        group.barrier()
    while "m1" in world._switchboard._calls:  # until this process, too, is told of the death
        PAUSE.wait(0.001)
    rest = world.create_rpc_group("rest", ["m0", "m2"])
    if world.rank == 2:
        group.register("key", lambda: "m2")
        group.pair("value", "m2")
    rest.barrier()
    told += [group.registered_sync("key"), group.get_paired("value").to_here()]
    rest.barrier()
    return told


def lose_unread_answers(world: World) -> Any:
    """A member dies whose large answers nobody has read; its survivor may read them or not, but goes on."""
    group = group_of(world)
    if world.rank == 1:
        assert group.rpc_sync("m0", add, args=(1,)) == 2
        group.barrier()
        PAUSE.wait(PATIENCE_S)
    futures = [group.rpc_async("m1", make_large) for _ in range(4)]
    assert group.rpc_sync("m1", add, args=(1,)) == 2  # the four are read on the way to this one
    unread = [group.rpc_async("m1", make_large) for _ in range(4)]
    group.barrier()
    member = world._node.member("m1")
    assert member is not None
    os.kill(member.pid, signal.SIGKILL)
    with pytest.raises(PeerLost, match="'m1'"):
        group.barrier()
    assert [future.wait().numel() for future in futures] == [LARGE] * 4
    for future in unread:
        try:
            assert future.wait().numel() == LARGE
        except PeerLost as error:
            assert "'m1'" in str(error)
    alone = world.create_rpc_group("alone", ["m0"])
    alone.barrier()
    return alone.rpc_sync("m0", add, args=(1,))
