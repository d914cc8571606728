"""Control groups: the limits that a container sets for this process, and the cores that it may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


CORES = "ECHELON_CORES"  # environment variable: plan for at most so many cores


def num_cores() -> int:
    """Returns the number of cores that this process may use: those of its affinity, at most the quota of its groups.

    A quota is processor time, not cores: 1.5 cores of it count as 2, because it takes two to use it up. ECHELON_CORES
    lowers the number, where several runs share the cores.
    """
    quotas = [quota for folder, is_v2 in groups("cpu") if (quota := _quota(folder, is_v2)) is not None]
    if (share := os.environ.get(CORES, "")).isdecimal() and int(share) > 0:
        quotas.append(int(share))
    return max(1, min(len(os.sched_getaffinity(0)), *map(math.ceil, quotas), 1 << 30))


def groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yields the control groups of this process that have `controller`, innermost first, and whether they are of v2.

    In a container the root is the container's own group. A folder or its files may be missing.
    """
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUPS / controller if controllers else GROUPS
        group = root / place.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, not controllers
            if folder == root:
                break


def _quota(group: Path, is_v2: bool) -> float | None:
    """Returns the cores' worth of time of a group; None without a limit."""
    try:
        if is_v2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except OSError:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
