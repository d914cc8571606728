"""Session folders: private, and removed by `sweep` if and only if their owner is dead."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.errors import ConfigError
from echelon.memory_check import check_fits, free_memory
from echelon.transport import session
from echelon.transport.session import OWNER, create_session, is_taken, leftovers, session_name, sweep


@pytest.fixture
def dead_pid() -> int:
    """The pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until the test ends."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def forge(shm_dir: Path, pid: int, **owner: object) -> Path:
    """A session folder of process `pid`; without `owner`, as if the process was killed before it wrote that file."""
    path = shm_dir / session_name(pid, "0123abcd")
    path.mkdir(mode=0o700)
    (path / "weights").write_bytes(b"\0" * 1000)
    if owner:
        (path / OWNER).write_text(json.dumps({"pid": pid, "start_ticks": 1, **owner}))
    return path


def test_a_session_is_private_and_names_its_owner(shm_dir: Path) -> None:
    path = create_session(str(shm_dir))
    assert path.parent == shm_dir
    assert path.stat().st_mode & 0o777 == 0o700
    assert json.loads((path / OWNER).read_text())["pid"] == os.getpid()
    assert create_session(str(shm_dir)) != path


def test_a_living_owner_keeps_its_folder(shm_dir: Path, other: subprocess.Popen[bytes]) -> None:
    mine = create_session(str(shm_dir))
    young = forge(shm_dir, other.pid)  # its owner has not written the owner file yet
    assert leftovers(str(shm_dir)) == sweep(str(shm_dir)) == []
    assert mine.exists() and young.exists()


def test_folders_of_the_dead_are_swept(shm_dir: Path, dead_pid: int) -> None:
    mine, dead = create_session(str(shm_dir)), forge(shm_dir, dead_pid, start_ticks=1)
    (found,) = leftovers(str(shm_dir))
    assert (found.path, found.owner_pid) == (dead, dead_pid)
    assert found.nbytes >= 1000
    assert dead.exists()  # looking removes nothing
    assert [leftover.path for leftover in sweep(str(shm_dir))] == [dead]
    assert not dead.exists() and mine.exists()


def test_a_new_session_sweeps(shm_dir: Path, dead_pid: int) -> None:
    dead = forge(shm_dir, dead_pid)
    create_session(str(shm_dir))
    assert not dead.exists()


def test_a_number_used_again_is_not_its_owner(shm_dir: Path, other: subprocess.Popen[bytes]) -> None:
    forge(shm_dir, other.pid, start_ticks=1)  # that process started at another time
    assert len(leftovers(str(shm_dir))) == 1


def test_a_damaged_owner_is_judged_by_its_name(shm_dir: Path, dead_pid: int, other: subprocess.Popen[bytes]) -> None:
    for pid in (dead_pid, other.pid):
        (forge(shm_dir, pid) / OWNER).write_text('{"pid": ')
    assert [found.owner_pid for found in leftovers(str(shm_dir))] == [dead_pid]


def test_where_somebody_listens_nobody_sweeps(shm_dir: Path, dead_pid: int) -> None:
    """Sibling processes share a folder that is named after their parent, and may outlive the parent."""
    path = forge(shm_dir, dead_pid)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / "host"))
        listener.listen()
        assert sweep(str(shm_dir)) == [] and path.is_dir()
    assert [leftover.path for leftover in sweep(str(shm_dir))] == [path]


def test_a_listener_that_is_stopped_holds_nobody_up(shm_dir: Path, dead_pid: int) -> None:
    path = forge(shm_dir, dead_pid)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path / "host"))
        listener.listen(0)
        for _ in range(5):  # more than its backlog holds
            handshakes = stack.enter_context(socket.socket(socket.AF_UNIX))
            handshakes.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                handshakes.connect(str(path / "host"))
        assert is_taken(path / "host") and sweep(str(shm_dir)) == []
    assert not is_taken(path / "host")


def test_folders_of_others_are_left_alone(shm_dir: Path, dead_pid: int) -> None:
    for name in ("echelon-data", "echelon-12-x", "other-1-0123abcd"):
        (shm_dir / name).mkdir()
    (shm_dir / session_name(dead_pid, "00000000")).write_text("a file")
    before = sorted(shm_dir.iterdir())
    assert sweep(str(shm_dir)) == []
    assert sorted(shm_dir.iterdir()) == before


@pytest.mark.parametrize("owner", [{}, {"start_ticks": 1}], ids=["being made", "made"])
def test_folders_of_another_container_are_left_alone(
    shm_dir: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch, owner: dict[str, int]
) -> None:
    """Its pids mean nothing here, and in a folder shared by siblings none may be listening yet."""
    with monkeypatch.context() as patch:
        patch.setattr(session, "pid_namespace", lambda: "pid:[4026532178]")
        theirs = forge(shm_dir, dead_pid, **owner)
    assert sweep(str(shm_dir)) == [] and theirs.is_dir()


@pytest.mark.parametrize("name", ["none", "file"])
def test_a_folder_that_cannot_be_used_is_refused(shm_dir: Path, name: str) -> None:
    (shm_dir / "file").write_text("")
    with pytest.raises(ConfigError, match=r"is not a writable folder.*--shm-dir"):
        create_session(str(shm_dir / name))


def test_doctor_lists_and_sweeps(shm_dir: Path, dead_pid: int, capsys: pytest.CaptureFixture[str]) -> None:
    dead = forge(shm_dir, dead_pid)
    assert main(["doctor", f"--shm-dir={shm_dir}"]) == 0
    told = capsys.readouterr().out
    assert f"left behind   {dead} (0.0 MiB, process {dead_pid})" in told and "doctor --sweep" in told
    assert main(["doctor", f"--shm-dir={shm_dir}", "--sweep"]) == 0
    assert f"removed       {dead}" in capsys.readouterr().out
    assert not dead.exists()
    assert main(["doctor", f"--shm-dir={shm_dir}"]) == 0
    assert "leftovers     none" in capsys.readouterr().out


@pytest.fixture
def tiny_shm(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A mount of 1 MiB; where mounting is not permitted, a folder that claims to be one."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(shm_dir)]
    if subprocess.run(command, capture_output=True, check=False).returncode == 0:
        yield shm_dir
        subprocess.run(["umount", str(shm_dir)], check=True)
        return
    real = os.statvfs(shm_dir)
    claimed = os.statvfs_result((4096, 4096, 256, 256, 256, *real[5:]))
    monkeypatch.setattr(session.os, "statvfs", lambda path: claimed)
    yield shm_dir


def test_too_small_a_mount_is_told_before_anything_is_made(
    tiny_shm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_fits(1000, "a run", free_memory(tiny_shm))
    with pytest.raises(
        ConfigError, match=r"a run needs 2.1 MB in .*, but only [\d.]+ MB are free. Lower --envs, enlarge"
    ):
        check_fits(2 << 20, "a run", free_memory(tiny_shm), "--envs")
    run_dir = tmp_path / "run"
    options = [f"--shm-dir={tiny_shm}", f"--run-dir={run_dir}", "--actor.envs=2000", "--steps=10"]
    assert main(["train", "impala", "CartPole-v1", *options]) == 2
    assert "the run's shared memory needs" in capsys.readouterr().err
    assert not run_dir.exists()
    assert not list(tiny_shm.iterdir())
