"""The status file of a worker or a host agent, as a health probe reads it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import echelon.status_file as status_file
from echelon.cli.main import main
from echelon.status_file import StatusFile


def test_it_shows_whether_the_run_is_joined(tmp_path: Path) -> None:
    path = tmp_path / "status"
    status = StatusFile(str(path))
    assert path.read_text() == "waiting\n"
    status.report(joined=True)
    assert path.read_text() == "joined\n"
    status.report(joined=False)
    assert path.read_text() == "waiting\n"
    status.remove()
    assert list(tmp_path.iterdir()) == []


def test_its_age_is_the_time_since_the_last_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status"
    status = StatusFile(str(path))
    os.utime(path, (0, 0))
    status.touch()
    assert path.stat().st_mtime == 0, "not written at every step"
    monkeypatch.setattr(status_file, "TOUCH_S", 0.0)
    status.touch()
    assert abs(path.stat().st_mtime - time.time()) < 60
    path.unlink()
    status.touch()  # somebody else removed it: nothing to touch
    status.remove()


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(tmp_path / "none" / "status")
    assert main(["worker", "--learner", "127.0.0.1:1", "--status-file", place]) == 2
    assert main(["host", "--join", "127.0.0.1:1", "--status-file", place]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all(place in line for line in errors), errors
