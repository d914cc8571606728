"""What a benchmark ran on, for its report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def hardware(device: str = "cpu") -> dict[str, Any]:
    """Cores, memory, processor, and the GPU where `device` is one."""
    gpu = None
    if device != "cpu":
        import torch

        gpu = torch.cuda.get_device_name(device) if torch.cuda.is_available() else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "processor": processor(),
        "gpu": gpu,
    }


def processor() -> str:
    """The name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
