"""Processes that exit while their groups are being released; prints how each exited."""

from __future__ import annotations

import os
import random
import sys
import time

import torch
import torch.distributed as dist

from echelon.world import process_group
from echelon.world.process_group import end_process_group, make_process_group

NUM_PROCESSES, NUM_GROUPS, LINGER_S = 6, 8, 0.01


def use_groups() -> None:
    process_group.LINGER_S = LINGER_S * random.random()
    groups = [make_process_group(dist.HashStore(), f"g{index}", 0, ["alone"]) for index in range(NUM_GROUPS)]
    for group in groups:
        group.allreduce([torch.ones(10)]).wait()
        end_process_group(group)
    del groups, group
    time.sleep(LINGER_S * random.random())


statuses = []
for _ in range(NUM_PROCESSES):
    pid = os.fork()
    if pid == 0:
        use_groups()
        sys.exit(0)
    statuses.append(os.waitpid(pid, 0)[1])
print(statuses)
