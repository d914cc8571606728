"""benchmarks/scale.py: many hosts on one machine, with real agents, engine and carrier."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import warm
from running import TESTS

SCRIPT = TESTS.parent / "benchmarks" / "scale.py"


def test_every_slot_of_four_hosts_comes_once_and_the_costs_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src"), "OMP_NUM_THREADS": "1"}
    rates = ("--seconds=0.6", "--slots-per-s=100", "--versions-per-s=10")
    command = (sys.executable, str(SCRIPT), "--hosts=4", "--actors-per-host=2", *rates, f"--json={path}")
    ended = warm.run(command, env=environment, timeout=240.0)
    assert ended.returncode == 0 and ended.stderr == "", ended.stdout + ended.stderr
    [row] = json.loads(path.read_text())
    assert row["actors"] == 8 and len(row["check"]["hosts"]) == 5
    assert row["check"]["slots"] >= 16 and row["check"]["wrong"] == row["check"]["missing"] == 0
    assert row["slots"]["bytes_per_slot"]["up"] > row["slot_bytes"] / 2, "some may come before the first reading"
    assert row["idle"]["bytes_per_host_s"]["up control"] > 0
