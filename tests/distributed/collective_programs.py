"""Programs of the members of collective groups; each function runs in every process of a launch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from echelon.errors import ConfigError, TransportError, TransportTimeout
from echelon.world import World, process_group


def every_operation(world: World) -> dict[str, Any]:
    """Returns the results of each operation in this process's tensors, in a group of all ranks."""
    size, rank = world.world_size, world.rank
    group = world.create_collective_group(list(range(size)))
    told: dict[str, Any] = {"size": group.size(), "ranks": group.ranks}

    def own() -> torch.Tensor:
        return torch.tensor([float(rank), 10.0])

    def room() -> list[torch.Tensor]:
        return [torch.zeros(2) for _ in range(size)]

    tensor = own()
    group.all_reduce(tensor)
    told["all_reduce"] = tensor.tolist()
    tensor = own()
    group.all_reduce(tensor, dist.ReduceOp.MAX)
    told["all_reduce max"] = tensor.tolist()
    tensor = own()
    group.reduce(tensor, 1)
    told["reduce to 1"] = tensor.tolist() if rank == 1 else None
    tensor = own()
    group.broadcast(tensor, 2)
    told["broadcast of 2"] = tensor.tolist()
    gathered = room()
    group.all_gather(gathered, own())
    told["all_gather"] = [one.tolist() for one in gathered]
    gathered = room()
    group.gather(own(), gathered if rank == 2 else None, dst=2)
    told["gather to 2"] = [one.tolist() for one in gathered] if rank == 2 else None
    tensor = own()
    group.scatter(tensor, [torch.full((2,), float(i)) for i in range(size)] if rank == 1 else None, src=1)
    told["scatter of 1"] = tensor.tolist()
    tensor = own()
    later = [group.all_reduce(tensor, async_op=True), group.barrier(async_op=True)]
    for operation in later:
        assert operation is not None
        assert operation.wait() is None and operation.is_completed() and operation.wait() is None
    told["later"] = tensor.tolist()
    group.barrier()
    group.destroy()
    return told


def messages(world: World) -> Any:
    """Returns the senders and messages that rank 0 received."""
    group = world.create_collective_group(list(range(world.world_size)))
    others = [rank for rank in range(world.world_size) if rank != 0]
    told: list[Any] = []
    if world.rank == 0:
        tensor = torch.zeros(3)
        told.append(sorted((group.recv(tensor), tensor.tolist()) for _ in others))  # from the first sender
        told.append([(group.recv(tensor, rank, tag=7), tensor.tolist()) for rank in reversed(others)])
        rooms = {rank: torch.zeros(3) for rank in others}
        waits = {rank: group.irecv(room, rank) for rank, room in rooms.items()}
        told.append([(waits[rank].wait(), rooms[rank].tolist()) for rank in others])
    else:
        content = torch.full((3,), float(world.rank))
        group.send(content, 0)
        group.send(content * 2, 0, tag=7)
        assert group.isend(content * 3, 0).wait() == 0
    group.barrier()
    group.destroy()
    return told


def several_groups(world: World) -> list[float]:
    """Rank 1 is in all groups, ranks 0 and 2 share none; the second group of the same ranks is a different group."""
    sums = []
    for ranks in ([0, 1], [1, 2], [1, 0], [1]):
        if world.rank in ranks:
            group = world.create_collective_group(ranks)
            tensor = torch.tensor([float(world.rank + 1)])
            group.all_reduce(tensor)
            sums.append(float(tensor))
            if ranks == [1, 0]:
                group.destroy()
        else:
            with pytest.raises(RuntimeError, match=f"rank {world.rank} is not"):
                world.create_collective_group(ranks)
    return sums


def misuse(world: World) -> None:
    group = world.create_collective_group([0, 1])
    tensor = torch.zeros(2)
    with pytest.raises(RuntimeError, match=r"rank 5 is not in the collective group of .*, which has the world ranks"):
        group.send(tensor, 5)
    with pytest.raises(RuntimeError, match="itself"):
        group.recv(tensor, world.rank)
    with pytest.raises(RuntimeError, match=r"tensor_list .* for each of 2 members, not 1 tensors"):
        group.all_gather([tensor], tensor)
    if world.rank == 1:
        with pytest.raises(RuntimeError, match=r"gather_list .*, not nothing"):
            group.gather(tensor, dst=1)
    with pytest.raises(RuntimeError, match="no rank 7"):
        world.create_collective_group([world.rank, 7])
    with pytest.raises(RuntimeError, match="twice"):
        world.create_collective_group([0, 1, 1])
    with pytest.raises(ConfigError, match="no backend 'smoke'"):
        world.create_collective_group([0, 1], backend="smoke")
    group.all_reduce(tensor)  # still sound
    group.destroy()
    group.destroy()
    with pytest.raises(RuntimeError, match="was destroyed"):
        group.barrier()


def averaged_gradient(world: World) -> list[float] | None:
    """Returns the gradient of a wrapped module in ranks 1 and 2; rank 0 is not involved."""
    if world.rank == 0:
        return None
    group = world.create_collective_group([1, 2])
    torch.manual_seed(world.rank)  # the modules differ until they are wrapped
    module = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), process_group=group.group)
    weights = [torch.zeros(1, 2) for _ in range(2)]
    group.all_gather(weights, module.module.weight.detach())
    assert torch.equal(*weights)
    module(torch.full((1, 2), float(world.rank))).sum().backward()
    gradient = module.module.weight.grad
    assert gradient is not None and not dist.is_initialized()
    group.barrier()
    return gradient.flatten().tolist()


def comes_late(world: World) -> str:
    """Rank 1 joins only after rank 0 has timed out; then both retry."""
    rpc = world.create_rpc_group("late", [world.name_of(rank) for rank in (0, 1)])
    if world.rank == 0:
        with pytest.raises(TransportTimeout, match=f"'{world.name_of(1)}' did not join") as caught:
            world.create_collective_group([0, 1], timeout=0.2)
        text = str(caught.value)
    rpc.barrier()
    group = world.create_collective_group([0, 1])
    group.barrier()
    group.destroy()
    return text if world.rank == 0 else ""


def fails_alone(world: World) -> str:
    """Rank 1 fails just when rank 0 has the group; then both retry."""
    rpc, connect = world.create_rpc_group("alone", [world.name_of(rank) for rank in (0, 1)]), process_group._gloo

    connected: list[Any] = []  # until rank 0 has the group: it may still be connecting to this process

    def too_late(*args: Any) -> Any:
        connected.append(connect(*args))
        raise RuntimeError("connecting took longer than the timeout")

    text = ""
    if world.rank == 0:
        world.create_collective_group([0, 1]).destroy()
    else:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(TransportError) as caught:
            patch.setattr(process_group, "_gloo", too_late)
            world.create_collective_group([0, 1])
        text = str(caught.value)
    rpc.barrier()
    connected.clear()
    group = world.create_collective_group([0, 1], timeout=20.0)
    group.barrier()
    group.destroy()
    return text


def listening(world: World) -> list[str]:
    """Returns the addresses at which this process listens for TCP while it is in a collective group."""
    group = world.create_collective_group([0, 1])
    inodes = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(path.readlink().name)
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    rows += [line.split() for line in Path("/proc/self/net/tcp6").read_text().splitlines()[1:]]
    addresses = [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    group.barrier()
    group.destroy()
    return addresses


def everything(world: World) -> dict[str, Any]:
    """Runs all programs above, one after another in one world of three; returns their results."""
    programs: list[Callable[[World], Any]] = [every_operation, messages, several_groups, averaged_gradient]
    if world.rank < 2:
        programs += [misuse, comes_late, fails_alone, listening]
    return {program.__name__: program(world) for program in programs}
