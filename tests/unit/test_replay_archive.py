"""The archive: snapshots are written during training, one at a time, and survive disk failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echelon.errors import ConfigError
from echelon.replay.archive import Archive
from echelon.replay.layout import item_layout
from echelon.replay.limiter import Limiter, LimiterRule
from echelon.replay.reader import ShardReader
from echelon.replay.restore import restore
from echelon.replay.shard import Shard, ShardWriter
from echelon.replay.sharded import Replay
from echelon.replay.snapshot import Snapshot, most_bytes

LAYOUT = item_layout({"observation": ((16,), np.float64), "number": ((), np.int64)}, 4_000)
LIMITER = Limiter(LimiterRule(samples_per_insert=1.0, min_size=1, capacity=4_000, batch=1, chunk=1))
FIRST, SECOND = "step_000000000001", "step_000000000002"


def full_replay(count: int = 4_000) -> Replay:
    shard = Shard(LAYOUT)
    numbers = np.arange(count)
    fields = {"observation": np.repeat(numbers[:, None], 16, 1).astype(np.float64), "number": numbers}
    ShardWriter(shard).append(fields, np.ones(count))
    return Replay([ShardReader(shard)], 0.6)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def restored(path: Path) -> int:
    """Restores a snapshot and checks every item; returns how many there are."""
    readers = [ShardReader(Shard(LAYOUT))]
    restore(path, readers)
    replay = Replay(readers, 0.6)
    drawn = replay.sample(replay.size, 0.4, np.random.default_rng(0))
    np.testing.assert_array_equal(drawn.fields["observation"][:, 3], drawn.fields["number"])
    return replay.size


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for one and a half snapshots; the test is skipped where mounting is not permitted."""
    path = tmp_path / "disk"
    path.mkdir()
    size = most_bytes(LAYOUT, 1) * 3 // 2
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_the_newest_whole_one_replaces_the_others(tmp_path: Path) -> None:
    archive, replay = Archive(tmp_path / "replay"), full_replay()
    assert archive.newest_first() == []
    (tmp_path / "replay").mkdir()
    (tmp_path / "replay" / "step_000000000000.part").mkdir()  # left by a process that died
    for name in (FIRST, SECOND):
        archive.begin(name, replay, LIMITER)
        assert archive.wait(60.0) and names(archive.folder) == [name]
        assert archive.newest_first() == [archive.folder / name] and restored(archive.folder / name) == 4_000
    assert not archive.error


def test_nobody_waits_for_the_disk_and_a_second_is_not_begun_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, replay, go_on = Archive(tmp_path), full_replay(), threading.Event()
    sync = os.fsync

    def slow(descriptor: int) -> None:
        assert go_on.wait(60.0)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    archive.begin(FIRST, replay, LIMITER)
    archive.begin(SECOND, replay, LIMITER)
    assert archive.is_writing and not archive.wait(0.0) and archive.newest_first() == []
    go_on.set()
    assert archive.wait(60.0) and names(tmp_path) == [FIRST]


def test_a_full_disk_is_told_before_anything_is_written_and_the_old_one_stays(full_disk: Path) -> None:
    archive, replay = Archive(full_disk / "replay"), full_replay()
    for name in (FIRST, SECOND, SECOND):
        archive.begin(name, replay, LIMITER)
        assert archive.wait(60.0)
    assert names(archive.folder) == [FIRST] and restored(archive.folder / FIRST) == 4_000
    assert archive.error is not None and "a snapshot needs 0.6 MB" in archive.error


def test_a_disk_that_fills_up_costs_the_new_one_only(full_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, replay = Archive(full_disk / "replay"), full_replay()
    archive.begin(FIRST, replay, LIMITER)
    assert archive.wait(60.0)
    monkeypatch.setattr(Snapshot, "nbytes", 0)  # the check for free space passes
    archive.begin(SECOND, replay, LIMITER)
    assert archive.wait(60.0)
    assert names(archive.folder) == [FIRST] and restored(archive.folder / FIRST) == 4_000
    assert archive.error is not None and "No space left on device" in archive.error
    monkeypatch.undo()
    archive.begin(SECOND, full_replay(100), LIMITER)  # a smaller one fits
    assert archive.wait(60.0) and names(archive.folder) == [SECOND] and restored(archive.folder / SECOND) == 100
    assert archive.error == ""


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    archive = Archive(tmp_path / "file" / "replay")
    archive.begin(FIRST, full_replay(), LIMITER)
    assert archive.wait(0.0) and "Not a directory" in str(archive.error)


def test_room_for_two_is_asked_for_at_the_start(full_disk: Path) -> None:
    archive, nbytes = Archive(full_disk / "run" / "replay"), most_bytes(LAYOUT, 1)
    with pytest.raises(ConfigError, match=r"replay.checkpoint=true needs 1.2 MB in .*twice.*Lower replay.capacity"):
        archive.check_fits(nbytes)
    archive.check_fits(nbytes // 2)
    archive.begin(FIRST, full_replay(), LIMITER)
    assert archive.wait(60.0) and not archive.error
    archive.check_fits(nbytes * 5 // 8)  # the existing snapshot will be replaced


@pytest.mark.parametrize("dies_after", [1, 2])
def test_one_that_is_replaced_is_there_until_the_new_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_after: int
) -> None:
    """A resumed run that makes no step writes a snapshot of the same name, and dies at each rename."""
    archive, renames, rename = Archive(tmp_path), list[Path](), os.rename
    archive.begin(FIRST, full_replay(), LIMITER)
    assert archive.wait(60.0)

    class Killed(BaseException):
        """Simulates the death of the process."""

    def dying(source: Path, target: Path) -> None:
        rename(source, target)
        renames.append(target)
        if len(renames) == dies_after:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", dying)
        with pytest.raises(Killed):
            Snapshot(archive.folder / FIRST, full_replay(200)).write()
    (there,) = Archive(tmp_path).newest_first()
    assert restored(there) == (4_000 if dies_after == 1 else 200)
    archive.begin(SECOND, full_replay(), LIMITER)
    assert archive.wait(60.0) and names(tmp_path) == [SECOND]


def test_a_mistake_of_ours_is_raised_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Snapshot, "_append", broken)
    archive = Archive(tmp_path)
    archive.begin(FIRST, full_replay(), LIMITER)
    with pytest.raises(RuntimeError, match="a bug"):
        archive.wait(60.0)
    assert names(tmp_path) == []


WRITER = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_replay_archive as here
from echelon.replay.archive import Archive
from echelon.replay.snapshot import Snapshot

archive, replay = Archive(Path(sys.argv[1])), here.full_replay()
archive.begin(here.FIRST, replay, here.LIMITER)
archive.wait(60.0)
written, append = [], Snapshot._append
def killed(snapshot, name, data):
    append(snapshot, name, data[:1000])
    os.kill(os.getpid(), signal.SIGKILL)
Snapshot._append = killed
archive.begin(here.SECOND, replay, here.LIMITER)
archive.wait(60.0)
"""


def test_killed_in_the_middle_of_one_the_one_before_is_there(tmp_path: Path) -> None:
    code = WRITER.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert names(tmp_path) == [FIRST, f"{SECOND}.part"]
    archive = Archive(tmp_path)
    assert archive.newest_first() == [tmp_path / FIRST] and restored(tmp_path / FIRST) == 4_000
    archive.begin(SECOND, full_replay(), LIMITER)
    assert archive.wait(60.0) and names(tmp_path) == [SECOND]
