"""Some of `make chaos`: seeded faults on runs of every kind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import warm

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from faults.campaign import Record, play, sessions
from faults.kinds import KINDS
from faults.table import table

SEED = 13


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_faults", [8, pytest.param(60, marks=pytest.mark.full)])
def test_runs_survive_seeded_faults_or_end_as_they_should(num_faults: int, tmp_path: Path) -> None:
    records: list[Record] = []
    for session in sessions(SEED, 1_000, [kind.name for kind in KINDS]):
        if len(records) >= num_faults:
            break
        records += play(session, warm.Popen, tmp_path)
    print(table(records))
    found = [f"{record}\n{(tmp_path / record.report).read_text()}" for record in records if record.problems]
    assert not found, "\n".join(found)
