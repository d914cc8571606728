"""Which processors hosts have: agents on one machine, or containers of one, may share them."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers and network namespaces of a kernel


def own_cpus() -> str:
    """Returns the processors that this process may use: MACHINE/MASK, a bit for each, in hexadecimal."""
    try:
        machine = BOOT_ID.read_text().strip()
    except OSError:
        machine = socket.gethostname()
    return f"{machine}/{sum(1 << cpu for cpu in os.sched_getaffinity(0)):x}"


def count_cpus(hosts: Iterable[tuple[str, int]]) -> int:
    """Returns the number of processors of all hosts; those that hosts share are counted once.

    Each host has its processors and the number of cores that it may use, which is lower in a container with a quota.
    """
    masks: defaultdict[str, int] = defaultdict(int)
    cores: defaultdict[str, int] = defaultdict(int)
    for cpus, num_cores in hosts:
        machine, _, mask = cpus.rpartition("/")
        masks[machine] |= int(mask, 16)
        cores[machine] += num_cores
    return sum(min(mask.bit_count(), cores[machine]) for machine, mask in masks.items())
