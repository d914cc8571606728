"""The types of the source and of the benchmarks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from running import TESTS


@pytest.mark.timeout(900)  # everything there is, where there is no cache
def test_mypy_finds_nothing() -> None:
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
