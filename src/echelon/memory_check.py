"""Checks before a run allocates: free memory of the machine, the container and a mount, and file descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from echelon.control_groups import PROC, groups
from echelon.errors import ConfigError

PROCESS_BYTES = 24 << 20  # private memory of an actor with a small environment
FIXED_DESCRIPTORS, DESCRIPTORS_PER_PROCESS = 128, 2  # of the coordinator and of the fork server


class Free(NamedTuple):
    """The free memory of one place."""

    nbytes: int
    where: str
    remedy: str


def check_fits(nbytes: int, what: str, free: Free, lower: str = "replay.capacity") -> None:
    """Raises ConfigError unless `nbytes` fit into `free`; allocates nothing. `lower` is the option to lower."""
    if nbytes > free.nbytes:
        raise ConfigError(
            f"{what} needs {_size(nbytes)} {free.where}, but only {_size(free.nbytes)} are free. Lower {lower}, "
            f"{free.remedy}"
        )


def check_processes(count: int, free: Free, lower: str = "--actors") -> None:
    """Raises ConfigError unless `count` processes can be started here; raises the limit of open files if needed."""
    nbytes, descriptors = count * PROCESS_BYTES, FIXED_DESCRIPTORS + DESCRIPTORS_PER_PROCESS * count
    if nbytes > free.nbytes:
        raise ConfigError(
            f"{count:,} processes need {_size(nbytes)} {free.where}, at least {_size(PROCESS_BYTES)} each besides "
            f"their environments, but only {_size(free.nbytes)} are free. Lower {lower}, {free.remedy}"
        )
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors > most:
        raise ConfigError(
            f"{count:,} processes need {descriptors:,} open files in the process that supervises them "
            f"({DESCRIPTORS_PER_PROCESS} each, and {FIXED_DESCRIPTORS}), but only {most:,} are allowed. Lower "
            f"{lower}, or raise the limit (ulimit -Hn)."
        )
    if descriptors > allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, most))


def total_memory() -> int:
    """Returns the memory of the machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory(folder: Path | None = None) -> Free:
    """Returns the memory that this process may still use: of the machine, the container, and the mount of `folder`."""
    lines = (PROC / "meminfo").read_text().splitlines()
    free = [next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), *_left_to_groups()]
    if folder is None:
        return Free(min(free), "of memory", "or give the machine or the container more memory.")
    found = os.statvfs(folder)
    remedy = "enlarge the mount or the container's memory, or name another --shm-dir."
    return Free(min(*free, found.f_bavail * found.f_frsize), f"in {folder}", remedy)


def num_out_of_memory() -> int:
    """Returns how many processes the kernel has killed for lack of memory (OOM) in the container, or on the machine if
    the container does not count them."""
    files = [folder / name for folder, _ in groups("memory") for name in ("memory.events", "memory.oom_control")]
    for file in [*files, PROC / "vmstat"]:
        with contextlib.suppress(OSError):
            for line in file.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _left_to_groups() -> Iterator[int]:
    for group, is_v2 in groups("memory"):
        left = _left_to(group, is_v2)
        if left is not None:
            yield left


def _left_to(group: Path, is_v2: bool) -> int | None:
    """Returns the memory that a group may still use, not counting cached files; None without a limit or group."""
    limit, usage = ("max", "current") if is_v2 else ("limit_in_bytes", "usage_in_bytes")
    try:
        most, used = (group / f"memory.{limit}").read_text().strip(), int((group / f"memory.{usage}").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    prefix = "total_" if "total_inactive_file" in stat else ""
    cached = sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
    return None if most == "max" else max(0, int(most) - used + cached)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
