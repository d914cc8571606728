"""A minute of `make chaos`: seeded faults on runs of every kind."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

import warm

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from faults.campaign import Record, play, sessions
from faults.kinds import KINDS
from faults.table import table

SEED, SECONDS = 13, 60.0


@pytest.mark.timeout(600)
def test_runs_survive_seeded_faults_or_end_as_they_should(tmp_path: Path) -> None:
    deadline = time.monotonic() + SECONDS
    records: list[Record] = []
    for session in sessions(SEED, 1_000, [kind.name for kind in KINDS]):
        if time.monotonic() > deadline:
            break
        records += play(session, warm.Popen, tmp_path)
    print(table(records))
    assert len(records) > 5
    found = [f"{record}\n{(tmp_path / record.report).read_text()}" for record in records if record.problems]
    assert not found, "\n".join(found)
