"""What a run does while its folder cannot be written: whole records, one report, another place at the end."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from echelon.disk import AppendFile, put_file
from echelon.runs.metrics import MetricsWriter, read_rows
from echelon.runs.outage import Fallback, Outage, newer_fallback


@pytest.fixture
def limit_files() -> Iterator[Callable[[int], None]]:
    """Limits the size of files that this process writes, as a full disk does; -1: no limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes if num_bytes >= 0 else before[0], before[1]))

    yield limit
    limit(-1)


def test_a_record_is_appended_as_a_whole_or_later(tmp_path: Path, limit_files: Callable[[int], None]) -> None:
    file = AppendFile(tmp_path / "records", is_new=True)
    file.append(b"0123456789")
    limit_files(25)
    for record in (b"a" * 10, b"b" * 10, b"c" * 10):
        file.append(record)
    assert (tmp_path / "records").read_bytes() == b"0123456789" + b"a" * 10 and file.error is not None
    limit_files(-1)
    file.append(b"d")
    file.close()
    assert (tmp_path / "records").read_bytes() == b"0123456789" + b"a" * 10 + b"b" * 10 + b"c" * 10 + b"d"
    assert file.error is None


def test_rows_wait_and_keep_their_order(tmp_path: Path, limit_files: Callable[[int], None]) -> None:
    metrics, elsewhere = MetricsWriter(tmp_path, append=False), tmp_path / "elsewhere"
    elsewhere.mkdir()
    metrics.write({"env_steps": 1})
    limit_files(20)
    for steps in range(2, 10):
        metrics.write({"env_steps": steps})
        assert metrics.error is not None
    with pytest.raises(OSError):
        metrics.write_waiting(tmp_path)
    limit_files(-1)
    metrics.write_waiting(elsewhere)
    metrics.write({"env_steps": 10})
    assert metrics.error is None
    metrics.close()
    assert [row["env_steps"] for row in read_rows(tmp_path)] == [*range(1, 11)]
    assert [row["env_steps"] for row in read_rows(elsewhere)] == [*range(2, 10)]


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, limit_files: Callable[[int], None]) -> None:
    path = tmp_path / "file"
    put_file(path, b"old")
    limit_files(10)
    with pytest.raises(OSError):
        put_file(path, b"new" * 100)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_an_outage_is_reported_when_its_first_part_fails_and_when_its_last_is_written() -> None:
    told: list[str] = []
    outage = Outage(Path("runs/x"), told.append)
    outage.note("metrics", "")
    for part, error in [("metrics", "full"), ("checkpoint", "full"), ("metrics", "still full"), ("metrics", "")]:
        outage.note(part, error)
        assert len(told) == 1 and "runs/x" in told[0] and "metrics: full" in told[0]
    outage.note("checkpoint", "")
    outage.note("metrics", "")
    assert len(told) == 2


def put(folder: Path) -> Path:
    put_file(folder / "file", b"content")
    return folder


@pytest.fixture
def fallback(tmp_path: Path) -> Fallback:
    return Fallback(tmp_path / "run", str(tmp_path / "other"), "word")


def test_the_run_folder_is_tried_again_before_the_other_one(fallback: Fallback) -> None:
    ticks: list[int] = []

    def tick() -> None:
        ticks.append(1)
        fallback.run_dir.mkdir()  # from now on it can be written

    assert fallback.write(put, 60.0, tick) == fallback.run_dir and ticks == [1]
    assert not fallback.sentence("it") and not fallback.path.exists()


def test_the_other_folder_is_private_has_the_configuration_and_is_named(fallback: Fallback) -> None:
    fallback.run_dir.mkdir()
    (fallback.run_dir / "config.json").write_text(json.dumps({"format": 1}))
    (fallback.run_dir / "file").mkdir()  # in the way
    assert fallback.write(put) == fallback.path
    assert (fallback.path / "config.json").read_text() == '{"format": 1}'
    assert fallback.path.stat().st_mode & 0o777 == 0o700
    assert str(fallback.path) in fallback.sentence("it") and str(fallback.run_dir) in fallback.sentence("it")
    (fallback.run_dir / "file").rmdir()
    assert fallback.write(put) == fallback.run_dir, "what follows goes to both"


def test_both_are_named_if_neither_can_be_written(fallback: Fallback) -> None:
    fallback.path.parent.write_text("in the way")
    assert fallback.write(put) is None
    assert str(fallback.path) in fallback.sentence("it") and str(fallback.run_dir) in fallback.sentence("it")


def test_a_folder_of_another_kind_is_not_used(fallback: Fallback, tmp_path: Path) -> None:
    fallback.path.parent.mkdir()
    fallback.path.symlink_to(tmp_path)
    assert fallback.write(put) is None and not (tmp_path / "file").exists()


def test_a_newer_end_in_the_other_folder_is_found(tmp_path: Path) -> None:
    fallback = Fallback(tmp_path / "run", str(tmp_path), "01234567")
    fallback.write(
        lambda folder: (folder / "checkpoints" / "step_000000000200").mkdir(parents=folder != fallback.run_dir)
    )
    for step, found in [(100, fallback.path), (200, None)]:
        assert newer_fallback(tmp_path / "run", str(tmp_path), f"step_{step:012d}") == found
    assert newer_fallback(tmp_path / "another", str(tmp_path), "step_000000000100") is None


@pytest.mark.parametrize("mode", [0o777, 0o750])
def test_a_folder_that_others_made_gets_nothing(fallback: Fallback, mode: int) -> None:
    """Its name can be guessed: a run that can be written must not leave a copy there."""
    fallback.run_dir.mkdir()
    fallback.path.mkdir(parents=True)
    fallback.path.chmod(mode)
    fallback.write(lambda folder: (folder / "weights").write_text("x"))
    assert list(fallback.path.iterdir()) == [] and (fallback.run_dir / "weights").exists()


def test_the_other_folder_is_in_the_temporary_one_by_default(tmp_path: Path) -> None:
    assert Fallback(tmp_path / "run", "", "word").path.parent == Path(tempfile.gettempdir())
