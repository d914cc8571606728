"""Processes that call each other in every way: nothing is lost, duplicated, reordered or changed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import warm
from running import TESTS

SCRIPT = TESTS.parent / "benchmarks" / "world_soak.py"


@pytest.mark.parametrize(
    ("num_calls", "deadline_s", "verdict"),
    [
        (300, 240.0, "too short to judge memory"),
        pytest.param(30_000, 1800.0, "memory flat", marks=pytest.mark.full),
    ],
)
def test_nothing_is_lost_doubled_or_reordered(tmp_path: Path, num_calls: int, deadline_s: float, verdict: str) -> None:
    path = tmp_path / "figures.json"
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--calls", str(num_calls), "--json", str(path)]
    told = warm.run(command, env=environment, timeout=deadline_s)
    assert told.returncode == 0 and told.stderr == "", told.stdout + told.stderr
    assert told.stdout.splitlines()[-1].endswith(verdict)
    reports = json.loads(path.read_text())["reports"]
    assert [sum(report["made"].values()) for report in reports] == [num_calls] * 3
    assert all(len(report["made"]) == 9 for report in reports)  # ways to call
