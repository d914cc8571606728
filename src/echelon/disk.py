"""Atomic creation and replacement of folders on disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def sync(path: Path) -> None:
    """Flushes a file, or the directory entries of a folder, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_folder(new: Path, target: Path, aside: Path) -> None:
    """Renames the folder `new`, already flushed, to `target`; all three paths have the same parent folder.

    An existing `target` is moved to `aside` first and removed last, so that a crash leaves one of them complete.
    """
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(target, aside)
    os.rename(new, target)
    sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)
