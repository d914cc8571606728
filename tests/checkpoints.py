"""Writes a checkpoint as a learner does, and waits for it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from echelon.runs.checkpoint import CheckpointWriter


def save_checkpoint(folder: Path, tree: Any, *, step: int, keep: int) -> Path:
    """Writes `tree` as the checkpoint of `step`; returns its path."""
    with contextlib.closing(CheckpointWriter(folder, keep)) as writer:
        path = writer.save(tree, step=step)
        writer.wait()
    return path
