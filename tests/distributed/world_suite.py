"""The suite for every transport of a world: programs that all members run, each with its own assertions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from echelon.errors import ConfigError
from echelon.world import RpcException, RpcGroup, World, get_world

CALLS = 200
noted: dict[str, list[int]] = {}


def echo(*args: Any, **kwargs: Any) -> Any:
    return (args, kwargs)


def name() -> str:
    world = get_world()
    assert world is not None
    return world.name


def note(caller: str, number: int) -> None:
    noted.setdefault(caller, []).append(number)


def noted_of(caller: str) -> list[int]:
    return noted[caller]


def fail(text: str) -> None:
    raise ValueError(text)


def total(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


def fill(num_floats: int, value: float) -> torch.Tensor:
    return torch.full((num_floats,), value)


def go_round(group: str, members: list[str], hops: int) -> list[str]:
    """Calls the next member, which calls the next, while the callers wait."""
    world = get_world()
    assert world is not None
    if hops == 0:
        return [world.name]
    following = members[(members.index(world.name) + 1) % len(members)]
    way: list[str] = GROUPS[group].rpc_sync(following, go_round, args=(group, members, hops - 1))
    return [world.name, *way]


GROUPS: dict[str, RpcGroup] = {}


def make_group(world: World, name: str) -> RpcGroup:
    group = GROUPS[name] = world.create_rpc_group(name, world.members)
    group.barrier()  # the functions of all members use it
    return group


def others(world: World) -> list[str]:
    return [member for member in world.members if member != world.name]


def values_travel(world: World) -> None:
    group = make_group(world, "values")
    tensor = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    array = np.arange(5, dtype=np.int16)
    for member in world.members:
        assert group.rpc_sync(member, name) == member
        args, kwargs = group.rpc_sync(member, echo, args=(1, "a", None, [2.5, b"x"], {"k": True}), kwargs={"z": tensor})
        assert args == (1, "a", None, [2.5, b"x"], {"k": True}) and torch.equal(kwargs["z"], tensor)
        (back,), _ = group.rpc_async(member, echo, args=(array,)).wait()
        assert back.dtype == array.dtype and np.array_equal(back, array)
        assert group.remote(member, fill, args=(3, 2.0)).to_here().tolist() == [2.0, 2.0, 2.0]
    group.barrier()
    group.destroy()


def large_tensors_travel(world: World) -> None:
    group = make_group(world, "large")
    for member in others(world):
        for num_floats in (20_000, 1_000_000, 3_000_000):
            tensor = torch.arange(num_floats, dtype=torch.float32)
            (back,), _ = group.rpc_sync(member, echo, args=(tensor,))
            assert torch.equal(back, tensor)
        futures = [group.rpc_async(member, fill, args=(500_000, float(i))) for i in range(12)]
        assert [float(future.wait()[-1]) for future in futures] == list(range(12))
    group.barrier()
    group.destroy()


def calls_stay_in_order(world: World) -> None:
    group = make_group(world, "order")
    for member in others(world):
        futures = [group.rpc_async(member, note, args=(world.name, i)) for i in range(CALLS)]
        for future in reversed(futures):
            future.wait()
        assert group.rpc_sync(member, noted_of, args=(world.name,)) == list(range(CALLS))
    group.barrier()
    group.destroy()


def errors_come_back(world: World) -> None:
    group = make_group(world, "errors")
    for member in others(world):
        with pytest.raises(RpcException, match="it broke") as caught:
            group.rpc_sync(member, fail, args=("it broke",))
        assert caught.value.kind == "ValueError" and "in fail" in caught.value.remote_traceback
        with pytest.raises(RpcException, match="again"):
            group.remote(member, fail, args=("again",)).to_here()
    with pytest.raises(ConfigError, match="lambda"):
        group.rpc_sync(world.members[0], lambda: 1)
    with pytest.raises(RuntimeError, match="'nobody' is not in the group 'errors'"):
        group.rpc_sync("nobody", name)
    with pytest.raises(RuntimeError, match=rf"0 is not in the group 'errors', whose members are '{world.members[0]}'"):
        group.rpc_sync(0, name)  # type: ignore[arg-type]
    for given in (3, "three", torch.ones(3)):
        with pytest.raises(RuntimeError, match=r"args of .*fail\(\) is \w+, not a tuple: write args=\(value,\)"):
            group.rpc_sync(world.members[0], fail, args=given)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"kwargs of 'service' is int, not a dict"):
        group.registered_sync("service", kwargs=3)  # type: ignore[arg-type]
    group.barrier()
    group.destroy()


def keys_are_shared(world: World) -> None:
    group = make_group(world, "keys")
    group.pair(f"value of {world.name}", {"tensor": torch.ones(3), "of": world.name})
    group.register(f"service of {world.name}", lambda number, add=0: number * 2 + add)
    group.barrier()
    for member in world.members:
        found = group.get_paired(f"value of {member}")
        assert found.owner == member and found.to_here()["of"] == member
        key = f"service of {member}"
        assert group.is_registered(key) and group.registered_sync(key, args=(4,), kwargs={"add": 1}) == 9
        assert (
            group.registered_async(key, args=(5,)).wait() == 10 and group.registered_remote(key, (6,)).to_here() == 12
        )
    with pytest.raises(KeyError, match=r"'no such'.*'keys'"):
        group.get_paired("no such")
    group.barrier()
    with pytest.raises(KeyError, match=r"already paired.*'keys'"):
        group.pair(f"value of {world.members[0]}", 1)
    with pytest.raises(KeyError, match="'keys'"):
        group.deregister(f"service of {others(world)[0]}")
    group.barrier()
    group.unpair(f"value of {world.name}")
    group.deregister(f"service of {world.name}")
    group.barrier()
    for member in world.members:
        assert not group.is_paired(f"value of {member}")
        with pytest.raises(KeyError, match="'keys'"):
            group.registered_sync(f"service of {member}", args=(1,))
    group.barrier()
    group.destroy()


def calls_go_round(world: World) -> None:
    """All members wait in calls to each other."""
    group = make_group(world, "round")
    hops = 3 * len(world.members)
    first = others(world)[0]
    way = group.rpc_sync(first, go_round, args=("round", world.members, hops))
    start = world.members.index(first)
    assert way == [world.members[(start + i) % len(world.members)] for i in range(hops + 1)]
    group.barrier()
    group.destroy()


def barriers_hold(world: World) -> None:
    group = make_group(world, "barrier")
    group.pair(f"at of {world.name}", 0)
    for number in range(1, 6):
        if world.rank == number % world.world_size:
            time.sleep(0.02)  # another member is late each time
        group.unpair(f"at of {world.name}")
        group.pair(f"at of {world.name}", number)
        group.barrier()
        assert [group.get_paired(f"at of {member}").to_here() for member in world.members] == [number] * len(
            world.members
        )
        group.barrier()
    threads = [threading.Thread(target=group.barrier) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    group.destroy()


def threads_call_at_once(world: World) -> None:
    group = make_group(world, "threads")
    failures: list[object] = []

    def call(number: int) -> None:
        for i in range(20):
            for member in others(world):
                (back,), _ = group.rpc_sync(member, echo, args=((number, i),))
                if back != (number, i):
                    failures.append(back)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    group.barrier()
    group.destroy()


def tensors_are_reduced(world: World) -> None:
    ranks = list(range(world.world_size))
    group = world.create_collective_group(ranks)
    tensor = torch.full((1000,), float(world.rank + 1))
    group.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((1000,), float(sum(rank + 1 for rank in ranks))))
    if world.rank == 0:
        assert sorted(group.recv(tensor) for _ in ranks[1:]) == ranks[1:]
    else:
        group.send(torch.zeros(1000), 0)
    group.barrier()
    group.destroy()
    if world.rank in (0, world.world_size - 1):  # the third member is not needed
        pair = world.create_collective_group([0, world.world_size - 1])
        tensor = torch.ones(2)
        pair.all_reduce(tensor)
        assert tensor.tolist() == [2.0, 2.0]
        pair.destroy()
    else:
        with pytest.raises(RuntimeError, match="rank 1 is not"):
            world.create_collective_group([0, world.world_size - 1])


PROGRAMS: dict[str, Callable[[World], None]] = {
    program.__name__: program
    for program in (
        values_travel,
        large_tensors_travel,
        calls_stay_in_order,
        errors_come_back,
        keys_are_shared,
        calls_go_round,
        barriers_hold,
        threads_call_at_once,
        tensors_are_reduced,
    )
}
