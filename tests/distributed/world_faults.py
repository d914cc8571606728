"""Programs with waits that must end: for a suspended peer, a dead owner, a dead process with unread replies.

Also members that leave, by `exit` or by a signal, while others wait for them in every way.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from world_cast import PATIENCE_S
from world_programs import add, die, group_of, sleep_long

from echelon.errors import EchelonError, PeerLost, TransportTimeout, WorldStopped
from echelon.world import RpcGroup, World, get_world

LARGE = 1 << 20  # numbers: sent through a separate block
PAUSE = threading.Event()
ARRIVED = threading.Semaphore(0)


def make_large() -> torch.Tensor:
    return torch.ones(LARGE)


def call_while_another_thread_opens(world: World) -> Any:
    """A thread opens the channel to a suspended member: another thread waits no longer than its own timeout."""
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
        with pytest.raises(TransportTimeout, match=r"'m1' opened no channel for 'm0' within 0\.1 s"):
            group.rpc_sync("m1", add, timeout=0.1, args=(1,))
        assert first.is_alive()
        os.kill(member.pid, signal.SIGCONT)
        first.join(PATIENCE_S)
        assert sums == [2]
    group.barrier()


def inherit_a_service(world: World) -> Any:
    """The owner of a key dies, and another member registers it: callers that cached the dead owner find the new one."""
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
    while "m1" in world._switchboard._calls:  # until this process, too, is notified of the death
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
    """A member dies with large unread replies; the survivor may read them or not, but continues."""
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


def exit_while_others_wait(world: World, how: str) -> Any:
    try:
        group = group_of(world)
        if world.rank == 1:
            exit(0)
        wait_somehow(group, how, "m0" if world.rank else "m2")
    except WorldStopped as error:
        return str(error)
    return None


def lose_a_member(world: World, how: str) -> Any:
    """`m1` dies while the others wait for it."""
    group = group_of(world)
    if world.rank == 1:
        group.pair("value", 1)
        group.register("slow", sleep_long)
    group.barrier()
    if world.rank == 1:
        threading.Timer(0.3, die).start()
        time.sleep(PATIENCE_S)
    begun = time.monotonic()
    try:
        wait_somehow(group, how, "m1")
    except EchelonError as error:
        return (type(error).__name__, str(error), time.monotonic() - begun)
    return None


def wait_somehow(group: RpcGroup, how: str, member: str) -> None:
    if how == "barrier":
        group.barrier()
    elif how == "call":
        group.rpc_sync(member, sleep_long)
    elif how == "future":
        group.rpc_async(member, sleep_long).wait()
    elif how == "remote":
        group.remote(member, sleep_long).to_here()
    elif how == "service":
        group.registered_sync("slow")
    elif how == "group":
        world = get_world()
        assert world is not None
        world.create_rpc_group("next", group.get_group_members())


def note_arrival() -> None:
    ARRIVED.release()


def lose_the_host(world: World) -> Any:
    group = group_of(world)
    if world.rank == 0:
        for _ in range(2):  # until both have created the group, where an error would not be recorded
            assert ARRIVED.acquire(timeout=PATIENCE_S)
        threading.Timer(0.3, die).start()
    else:
        group.rpc_async("m0", note_arrival)
    told = []
    for wait in (group.barrier, lambda: group.rpc_sync("m2", add, args=(1,))):
        try:
            while True:
                wait()
                group.barrier()
        except PeerLost as error:
            told.append(str(error))
    return told


def miss_somebody(world: World) -> Any:
    """The survivors continue without the dead member."""
    group = group_of(world)
    if world.rank == 1:
        die()
    with pytest.raises(PeerLost, match=r"'m1'.* its process \d+ has ended"):
        group.barrier()
    with pytest.raises(PeerLost, match=r"'m1'.*has ended"):
        group.rpc_sync("m1", add, args=(1,))
    assert world.members == ["m0", "m2"] and "has ended" in world.why_lost("m1")
    rest = world.create_rpc_group("rest", ["m0", "m2"])
    rest.barrier()
    value = rest.rpc_sync("m0", add, args=(1,))
    rest.barrier()
    return value
