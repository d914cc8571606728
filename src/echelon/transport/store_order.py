"""Whether the processor of this machine lets processes share memory without locks. Imports nothing heavy."""

from __future__ import annotations

import platform

from echelon.errors import ConfigError


def keeps_store_order() -> bool:
    """Returns whether the plain stores of a process become visible to others in program order, as on x86-64."""
    return platform.machine().lower() in ("x86_64", "amd64")


def check_platform() -> None:
    """Raises ConfigError on processors that reorder stores: rows, messages and weights are published by a plain store.

    The local engine and every member of a world call this before they share memory with other processes.
    """
    if not keeps_store_order():
        raise ConfigError(
            f"processes cannot share memory on this machine: its processor is {platform.machine()}, and only x86-64 "
            "makes the stores of one process visible to others in order. Use an x86-64 machine, or train in one "
            "process with --engine inline."
        )
