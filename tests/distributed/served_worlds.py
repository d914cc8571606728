"""Worlds for the tests of servers and buffers: the scenarios that their members run together."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from buffer_members import (
    concurrent,
    episodes,
    grown,
    prioritized_buffer,
    rooms,
    stored,
    tainted,
    transition,
    uniform,
    weights,
)
from server_members import (
    by_hand,
    error_of,
    failing,
    flooded,
    gradients,
    held_up,
    late,
    net,
    ordered,
    push_gradient,
    shared_model,
    wait_until,
)

from echelon.servers import PushPullGradServer, PushPullGradServerImpl
from echelon.world import RpcGroup, World


def everything(world: World) -> dict[str, Any]:
    """Runs all scenarios in one world, since processes take long to start."""
    return {
        "ordered": ordered(world),
        "shared model": shared_model(world),
        "by hand": by_hand(world),
        "sum": gradients(world, "sum"),
        "mean": gradients(world, "mean"),
        "flooded": flooded(world),
        "held up": held_up(world),
        "late": late(world),
        "failing": failing(world),
        "uniform": uniform(world, 200),
        "weights of two": weights(world, 300, (40, 100, 0)),
        "weights of three": weights(world, 300, (40, 100, 25)),
        "stored": stored(world),
        "tainted": tainted(world),
        "grown": grown(world),
        "rooms": rooms(world),
        "episodes": episodes(world),
        "concurrent": concurrent(world, 3000),
    }


def three_of_which_one_dies(folder: str) -> None:
    """Starts members that share the imports of this process; writes their exit codes to a file."""
    torch.optim.SGD(net().parameters(), lr=1.0)  # the first one imports for seconds
    context = multiprocessing.get_context("fork")
    members = [context.Process(target=with_a_death, args=(rank, folder)) for rank in range(3)]
    for member in members:
        member.start()
    for member in members:
        member.join()
    (Path(folder) / "codes.json").write_text(json.dumps([member.exitcode for member in members]))


def server_of(group: RpcGroup, name: str, primary: str, secondary: str, batch: int) -> PushPullGradServer:
    """Creates a client of a gradient server with one secondary reducer; a member that is no reducer only pushes."""
    own = group.get_cur_name()
    if own in (primary, secondary):
        impl = PushPullGradServerImpl(name, group, "m", primary, [secondary], reduce_batch_size=batch)
        if own == primary:
            model = net()
            impl.manage_model(model, torch.optim.SGD(model.parameters(), lr=1.0))
        impl.start()
    return PushPullGradServer(name, group, "m", [secondary])


def with_a_death(rank: int, folder: str) -> None:
    """Member 1 dies; 0 and 2 continue to sample and push, and write their findings.

    The World is created without `launch`, which would end it.
    """
    world = World(name=str(rank), rank=rank, world_size=3, rpc_timeout=30)
    group = world.create_rpc_group("mortal", world.members)
    buffer = prioritized_buffer(group)
    impl = PushPullGradServerImpl("g", group, secondary_reducers=["1", "2"], reduce_batch_size=1)
    if rank == 0:
        model = net()
        impl.manage_model(model, torch.optim.SGD(model.parameters(), lr=1.0))
    impl.start()
    doomed = PushPullGradServerImpl("doomed", group, primary_reducer="1", reduce_batch_size=1)
    if rank == 1:
        doomed.manage_model(model := net(), torch.optim.SGD(model.parameters(), lr=1.0))
    doomed.start()
    abandoned = server_of(group, "abandoned", primary="0", secondary="1", batch=4)
    told = server_of(group, "told", primary="1", secondary="2", batch=1)
    group.register(f"members of {rank}", lambda: world.members)
    for number in range(50):
        buffer.append(transition(100 * rank + number), 1.0)
    group.barrier()
    sizes = [buffer.all_size(), buffer.sample_batch(100).size]
    indexes = buffer.sample_batch(100).indexes
    assert indexes is not None and len(indexes) == 3
    push_gradient(doomed.accessor, net(), 1.0)
    if rank == 0:
        push_gradient(told, net(), 1.0)
        for _ in range(3):
            push_gradient(abandoned, net(), 1.0)
    group.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until(lambda: all(group.registered_sync(f"members of {one}") == ["0", "2"] for one in (0, 2)))
    buffer.update_priority(np.full(100, 3.0), indexes)  # those of the dead member are skipped
    batch = buffer.sample_batch(100, sample_attrs=("reward",))
    assert batch.batch is not None and batch.weights is not None
    sizes += [batch.size, buffer.all_size(), len(batch.weights)]
    if rank == 0:
        for _ in range(8):
            push_gradient(impl.accessor, net(), 1.0)
        wait_until(lambda: impl.steps == 8)
    report = {
        "sizes": sizes,
        "rewards": sorted({int(x) // 100 for x in batch.batch[0].flatten()}),
        "lost": buffer.lost,
        "stats": sorted(impl.accessor.stats()),
        "doomed": error_of(lambda: push_gradient(doomed.accessor, net(), 1.0)),
        "again": error_of(lambda: push_gradient(doomed.accessor, net(), 1.0)),
        "undelivered": doomed.undelivered,
        "passed over": buffer.passed_over,
        "drawn from the dead": len(indexes["1"][0]),
    }
    if rank == 0:
        report["told"] = [error_of(lambda: push_gradient(told, net(), 1.0)) for _ in range(2)]
        report["told"].append(error_of(told.watch))
        report["abandoned"] = [error_of(lambda: push_gradient(abandoned, net(), 1.0)) for _ in range(2)]
        report["gone"] = abandoned.lost
    (Path(folder) / f"{rank}.json").write_text(json.dumps(report))
    wait_until((Path(folder) / "0.json").exists)  # 2 serves until 0 is done
    world.stop()
