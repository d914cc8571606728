"""What the tests of several folders share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import Running


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A folder in shared memory; a short name, as sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="t-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


class Runs:
    """Starts trainings; all of them end with the test."""

    def __init__(self, folder: Path, shm_dir: Path) -> None:
        self.folder, self.shm_dir = folder, shm_dir
        self.started: list[Running] = []

    def train(self, preset: str = "impala", env: str = "CartPole-v1", **options: Any) -> Running:
        options = {"steps": 10**9, "actor.envs": 8, "evaluation.interval-s": 0, **options}
        run = Running.train(preset, env, self.folder / "run", self.shm_dir, **options)
        self.started.append(run)
        return run

    def resume(self, steps: int) -> Running:
        run = Running.resume(self.folder / "run", self.shm_dir, steps)
        self.started.append(run)
        return run


@pytest.fixture
def runs(tmp_path: Path, shm_dir: Path) -> Iterator[Runs]:
    runs = Runs(tmp_path, shm_dir)
    yield runs
    for run in runs.started:
        run.close()
