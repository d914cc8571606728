"""Two learners share their gradients through DistributedDataParallel, and wait for nothing else in the world.

python wrapped_learners.py: worker 0 ends the world by `exit(0)` while they learn; rank 2 is notified in a call, rank 1
only by the gradients that no longer arrive.
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

from echelon.frames.modules import among_learners, call
from echelon.world import World


def answer() -> None:
    """Nothing."""


def main(rank: int) -> None:
    world = World(name=str(rank), rank=rank, world_size=3)
    everybody = ["0", "1", "2"]
    if rank == 0:
        world.create_rpc_group("everybody", everybody).barrier()
        time.sleep(0.2)
        exit(0)
    learners = world.create_collective_group([1, 2])
    model = DistributedDataParallel(nn.Linear(4, 1), process_group=learners.group)
    group = world.create_rpc_group("everybody", everybody)
    group.barrier()
    while True:
        if rank == 2:
            group.rpc_sync("0", answer)
        value = call(model, {"input": torch.ones(2, 4)})
        with among_learners(model):
            value.sum().backward()


if __name__ == "__main__":
    spawn(main, nprocs=3)
    print("all gone", flush=True)
