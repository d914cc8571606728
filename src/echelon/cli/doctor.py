"""`echelon doctor`: shows the resources of this machine and the leftovers of dead runs."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence

from echelon.cli.main import Parser
from echelon.control_groups import num_cores


def run(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="echelon doctor",
        description="Show the cores, GPUs and shared memory of this machine, and leftovers of dead runs.",
    )
    parser.add_argument("--shm-dir", default="/dev/shm", metavar="DIR", help="directory of the shared-memory files")
    parser.add_argument("--sweep", action="store_true", help="remove the leftovers of dead runs")
    known = parser.parse_args(list(arguments))
    for name, text in _machine(known.shm_dir):
        print(f"{name:<14}{text}")
    return _leftovers(known.shm_dir, sweep_them=known.sweep)


def _machine(shm_dir: str) -> list[tuple[str, str]]:
    import torch

    from echelon.runs.folder import versions
    from echelon.transport.store_order import keeps_store_order

    cores = num_cores()
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_name(i) for i in range(num_gpus)]
    rows = [("cores", f"{cores} usable of {os.cpu_count()} ({platform.machine()})"), ("gpu", ", ".join(gpus) or "none")]
    if os.path.isdir(shm_dir):
        usage = shutil.disk_usage(shm_dir)
        rows.append(("shared memory", f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} at {shm_dir}"))
    else:
        rows.append(("shared memory", f"{shm_dir} does not exist: choose another folder with --shm-dir"))
    rows.append(
        ("store order", "kept" if keeps_store_order() else "weak: shared memory is not supported, use --engine inline")
    )
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions().items() if version)))
    return rows


def _leftovers(shm_dir: str, *, sweep_them: bool) -> int:
    from echelon.transport.session import leftovers, sweep

    found = sweep(shm_dir) if sweep_them else leftovers(shm_dir)
    verb = "removed" if sweep_them else "left behind"
    for leftover in found:
        print(f"{verb:<14}{leftover.path} ({leftover.nbytes / 2**20:.1f} MiB, process {leftover.owner_pid})")
    if not found:
        print(f"{'leftovers':<14}none")
    elif not sweep_them:
        print("The next run removes them; `echelon doctor --sweep` removes them now.")
    return 0
