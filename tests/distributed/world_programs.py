"""Programs that the tests of the world run in its members."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from world_cast import PATIENCE_S, TIMEOUT_S, Outcome

from echelon.errors import ConfigError, PeerLost, Refused, TransportTimeout, WorldError
from echelon.world import RpcException, RpcGroup, World, get_cur_name, get_cur_rank, get_world, membership
from echelon.world.entrance import Entrance, enter

# Functions that members call in each other.


def add(a: Any, b: Any = 1) -> Any:
    return a + b


def nested(to: str, depth: int) -> int:
    """Calls back and forth between this member and `to`."""
    world = get_world()
    assert world is not None
    if depth == 0:
        return 0
    deeper: int = GROUP[0].rpc_sync(to, nested, args=(world.name, depth - 1))
    return 1 + deeper


def leave_by_exit() -> None:
    raise SystemExit(3)


def make_unsendable() -> object:
    return {1, 2}


def sleep_long() -> None:
    time.sleep(PATIENCE_S)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def num_kept() -> int:
    """Returns how many results this process keeps for others."""
    world = get_world()
    assert world is not None
    return sum(len(callee.handle.kept) for callee in world._switchboard._served.values())


GROUP: list[RpcGroup] = []
gate = threading.Event()


def wait_at_gate() -> bool:
    return gate.wait(PATIENCE_S)


def open_gate() -> None:
    gate.set()


def group_of(world: World, name: str = "all") -> RpcGroup:
    group = world.create_rpc_group(name, [f"m{rank}" for rank in range(world.world_size)])
    GROUP[:] = [group]
    group.barrier()
    return group


# Programs.


def tell_who_is_there(world: World) -> Any:
    group = group_of(world)
    told = (world.rank, world.name, world.world_size, world.members, world.get_members(), world.get_ranks())
    assert (get_cur_rank(), get_cur_name()) == (world.rank, world.name)
    assert get_world() is world and world.timeout_s == TIMEOUT_S and world.address.startswith("ipc://")
    with pytest.raises(WorldError, match="in a world already, as 'm0'" if world.rank == 0 else "already"):
        World("again", 0, 1)
    described = (group.size(), group.is_member(), group.is_member("m1"), group.is_member("x"))
    assert described == (2, True, True, False)
    assert (group.get_group_name(), group.get_group_members(), group.get_cur_name()) == ("all", ["m0", "m1"], told[1])
    group.barrier()
    return told


def recurse(world: World) -> Any:
    group = group_of(world)
    other = f"m{1 - world.rank}"
    depth = group.rpc_sync(other, nested, args=(world.name, 12))
    group.barrier()
    return depth


def wait_in_a_handler(world: World) -> Any:
    """A call that waits in its handler delays only the calls of the same caller."""
    group = group_of(world)
    if world.rank == 1:
        stuck = group.rpc_async("m0", wait_at_gate)
        behind = group.rpc_async("m0", add, args=(1,))
        assert not stuck.done() and not behind.done()
        group.barrier()
        group.barrier()
        return (stuck.wait(), behind.wait())
    group.barrier()  # the gate is shut until m1 has looked
    if world.rank == 2:
        assert group.rpc_sync("m0", add, args=(2,)) == 3  # calls of another caller are served
        group.rpc_sync("m0", open_gate)
    group.barrier()
    return None


def leave_answers_unread(world: World) -> Any:
    """Futures that are never awaited block nobody: more replies than any line holds, in both directions."""
    group = group_of(world)
    other = f"m{1 - world.rank}"
    block = torch.zeros(2000)
    for i in range(400):
        group.rpc_async(other, add, args=(block, i))
    for i in range(8_000):
        group.rpc_async(other, add, args=(1, i))
    assert group.rpc_sync(other, add, args=(1, 2)) == 3
    num_left = len(world._switchboard._calls[other]._futures)
    group.barrier()  # after it the other may leave
    return num_left


def keep_remotes(world: World) -> Any:
    group = group_of(world)
    if world.rank == 0:
        handles = [group.remote("m1", add, args=(torch.ones(1000), i)) for i in range(50)]
        assert [float(handle.to_here()[0]) for handle in handles] == [1.0 + i for i in range(50)]
        assert handles[0].owner == "m1" and group.rpc_sync("m1", num_kept) == 50
        failed = group.remote("m1", add, args=("x",))
        with pytest.raises(RpcException, match="TypeError"):
            failed.to_here()
        del handles, failed
        gc.collect()
        group.rpc_sync("m1", add, args=(1,))
        assert group.rpc_sync("m1", num_kept) == 0
    group.barrier()
    return None


def refuse_bad_calls(world: World) -> Any:
    group = group_of(world)
    other = f"m{1 - world.rank}"

    def inner() -> None: ...

    for function, why in (
        (lambda: 1, "a lambda of world_programs cannot be called"),
        (inner, "it is defined inside another object"),
        (len, "not a function written in Python"),
        (torch.add, "builtin_function_or_method"),
        (world.get_members, "method"),
        (Outcome, "it is a type"),
    ):
        with pytest.raises(ConfigError, match=why) as caught:
            group.rpc_sync(other, function)
        assert "register() it as a service" in str(caught.value)
    with pytest.raises(Refused, match=r"torch\.functional is not a module of this program"):
        group.rpc_sync(other, torch.functional.einsum)
    with pytest.raises(Refused, match=r"echelon\.world\.world is not a module of this program"):
        group.rpc_sync(other, get_world)
    with pytest.raises(Refused, match="os is not a module of this program"):
        group.rpc_sync(other, os.walk)
    with pytest.raises(ConfigError, match=r"world_programs:add\(\) cannot be sent to 'm.': args\[0\]\['k'\] is a"):
        group.rpc_sync(other, add, args=({"k": {1}},))
    with pytest.raises(ConfigError, match=r"kwargs\['b'\] is a builtins.object"):
        group.rpc_sync(other, add, args=(1,), kwargs={"b": object()})
    with pytest.raises(RpcException, match="which cannot be sent"):
        group.rpc_sync(other, make_unsendable)
    with pytest.raises(RpcException, match="SystemExit: 3"):
        group.rpc_sync(other, leave_by_exit)
    for wait in (
        lambda: group.rpc_sync(other, wait_at_gate, timeout=0.05),
        lambda: group.rpc_async(other, wait_at_gate, timeout=0.05).wait(),
        lambda: group.rpc_async(other, wait_at_gate).wait(0.05),
        lambda: group.remote(other, wait_at_gate, timeout=0.05).to_here(),
        lambda: group.remote(other, wait_at_gate).to_here(0.05),
    ):
        with pytest.raises(TransportTimeout, match=r"did not answer world_programs:wait_at_gate\(\) within 0.05 s"):
            wait()
    group.barrier()
    open_gate()
    group.barrier()
    return None


def misuse_groups(world: World) -> Any:
    with pytest.raises(WorldError, match=r"'m[01]' is not in the group 'odd' of 'm7'"):
        world.create_rpc_group("odd", ["m7"])
    with pytest.raises(WorldError, match="distinct members"):
        world.create_rpc_group("odd", ["m0", "m0", "m1"])
    group = group_of(world)
    with pytest.raises(WorldError, match="there is a group 'all' already"):
        world.create_rpc_group("all", ["m0", "m1"])
    if world.rank == 0:
        absent = r"'nobody' did not create the group 'vain' within 0\.2 s\. Not in this world: 'nobody'\."
        with pytest.raises(TransportTimeout, match=absent):
            world.timeout_s = 0.2
            world.create_rpc_group("vain", ["m0", "nobody"])
        world.timeout_s = TIMEOUT_S
        with pytest.raises(TransportTimeout, match=r"'m1' did not reach the barrier of the group 'all' within 0.1 s"):
            group.barrier(timeout=0.1)
        open_gate()
    else:
        assert group.rpc_sync("m0", wait_at_gate)
    group.barrier()
    if world.rank == 1:
        group.pair("mine", 1)
    group.barrier()
    if world.rank == 0:
        with pytest.raises(KeyError, match="'mine' is already paired in the group 'all', by 'm1'"):
            group.pair("mine", 2)
        with pytest.raises(KeyError, match="'mine' is not paired by 'm0' in the group 'all'"):
            group.unpair("mine")
        with pytest.raises(KeyError, match="'mine' is not found in the group 'all': no member has registered it"):
            group.registered_sync("mine")
        with pytest.raises(WorldError, match="is not callable"):
            group.register("x", 3)  # type: ignore[arg-type]
        group.register("mine", add)  # values and services have separate names
    group.barrier()
    group.destroy()
    group.destroy()
    with pytest.raises(WorldError, match=r"'all' was used after destroy\(\)"):
        group.barrier()
    assert group_of(world).is_paired("mine") is False  # a new group of that name has none of the old keys
    GROUP[0].barrier()
    return None


def move_a_service(world: World) -> Any:
    """A key moves to another owner: callers that cached the first owner find the second."""
    group = group_of(world)
    told = []
    for owner in ("m0", "m1"):
        if world.name == owner:
            group.register("key", lambda: world.name)
        group.barrier()
        told += [group.registered_sync("key"), group.registered_async("key").wait()]
        group.barrier()
        if world.name == owner:
            group.deregister("key")
        group.barrier()
    with pytest.raises(KeyError, match="'key' is not found in the group 'all'"):
        group.registered_async("key").wait()
    group.barrier()
    return told


def use_in_a_fork(world: World) -> Any:
    group = group_of(world)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert get_world() is None
            group.rpc_sync("m0", add, args=(1,))
        except WorldError as error:
            code = 0 if "this is a fork of it" in str(error) else 2
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert group.rpc_sync("m0", add, args=(1,)) == 2
    group.barrier()
    return code


def stop_and_begin_again(world: World) -> Any:
    """A process may leave a world and enter the next one."""
    for _ in range(10):
        group = group_of(world)
        assert group.rpc_sync(f"m{1 - world.rank}", add, args=(1,)) == 2
        group.barrier()
        world.stop()
        assert get_world() is None
        with pytest.raises(WorldError, match="has left the world"):
            group.barrier()
        world = World(f"m{world.rank}", world.rank, 2, timeout_s=TIMEOUT_S)
    return None


def is_stopping() -> bool:
    return bool(STOPPING)


STOPPING: list[bool] = []


def stop_the_host_early(world: World) -> Any:
    """The host is done; the others call it, and use its barriers, for long after its timeout."""
    group = group_of(world)
    if world.rank == 0:
        told: list[str] = []
        membership.print_error = told.append
        world.timeout_s = 0.05
        STOPPING.append(True)
        world.stop()
        return told
    while not group.rpc_sync("m0", is_stopping):
        time.sleep(0.001)
    others = world.create_rpc_group("others", ["m1", "m2"])
    until = time.monotonic() + 20 * 0.05
    while time.monotonic() < until:
        assert group.rpc_sync("m0", add, args=(1,)) == 2
    others.barrier()
    world.stop()
    return None


def receive_guests(world: World) -> Any:
    """Two members with ranks and one guest, which joins, is called, calls, and leaves."""
    if world.rank == 0:
        ranked = world.create_rpc_group("ranked", ["m0", "m1"])
        ranked.barrier()
        with pytest.raises(Refused, match=r"there is a 'm1' in the world at .* already\. Names are unique"):
            enter(Entrance("m1", -1, -1, world.address, TIMEOUT_S))
        with pytest.raises(Refused, match="is complete: 2 ranks joined, and it has begun"):
            enter(Entrance("m2", 1, 2, world.address, TIMEOUT_S))
        with pytest.raises(Refused, match=r"as rank 1 of 7, .* has 2 ranks|is complete"):
            enter(Entrance("m2", 1, 7, world.address, TIMEOUT_S))
        ranked.destroy()
    elif world.rank == 1:
        world.create_rpc_group("ranked", ["m0", "m1"]).barrier()
    everybody = world.create_rpc_group("everybody", ["m0", "m1", "guest0"])
    for member in everybody.get_group_members():
        assert everybody.rpc_sync(member, add, args=(1,)) == 2
    everybody.barrier()
    told = (world.rank, world.world_size, world.members, world.get_ranks())
    everybody.barrier()
    if world.rank < 0:
        world.stop()
        return told
    with pytest.raises(PeerLost, match=r"'guest0'.*it left"):
        everybody.rpc_sync("guest0", sleep_long)
    with pytest.raises(PeerLost, match="'guest0' never reached the barrier of the group 'everybody': it left"):
        everybody.barrier()
    rest = world.create_rpc_group("rest", ["m0", "m1"])
    assert world.members == ["m0", "m1"]
    rest.barrier()
    return told
