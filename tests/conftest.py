"""What the tests of several folders share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from running import Runs


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A folder in shared memory; a short name, as sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="t-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def runs(tmp_path: Path, shm_dir: Path) -> Iterator[Runs]:
    runs = Runs(tmp_path, shm_dir)
    yield runs
    for run in runs.started:
        run.close()
