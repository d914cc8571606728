"""Folders that appear on a disk whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_folder(new: Path, target: Path, aside: Path) -> None:
    """Gives the folder `new`, which is on the disk, the name `target`; all three lie in one folder.

    What has that name now waits as `aside` until the new one has it, so that a crash leaves one of them whole.
    """
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(target, aside)
    os.rename(new, target)
    sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)
