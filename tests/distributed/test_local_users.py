"""Other users of this machine: what they reach over the loopback, and what they put into shared folders."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import other_user
import warm
from echelon.cli.main import main
from echelon.errors import ConfigError, Refused
from echelon.hosts.logs import make_log_folder
from echelon.runs.folder import RunFolder
from echelon.transport.lines import LineReader, LineWriter
from echelon.transport.ring import LINE_BYTES
from echelon.transport.secret import secret_file, user_secret
from echelon.transport.segments import join_segment
from echelon.transport.session import OWNER, create_session, session_name
from echelon.transport.shared_memory import Doorbell
from echelon.world import World
from echelon.world.node import Node
from echelon.world.watch import NONCE, MemberInfo, write_info
from entrance import Entrance
from other_user import NOBODY
from running import DEADLINE_S, TESTS, wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
DEAD_PID = 2**22 + 1  # larger than any


class OtherUser:
    """A process of another user, which does what it is asked to."""

    def __init__(self, state: Path) -> None:
        path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
        self.process = warm.Popen(
            [sys.executable, other_user.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(state)},
        )

    def ask(self, action: str, argument: object) -> Any:
        print(json.dumps([action, str(argument)]), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(DEADLINE_S)}"
        return json.loads(line)

    def ask_while(self, action: str, argument: object, work: Callable[[], object]) -> Any:
        """Asks, and meanwhile calls `work` again and again."""
        replies: list[Any] = []
        thread = threading.Thread(target=lambda: replies.append(self.ask(action, argument)))
        thread.start()
        wait_until(lambda: (work(), replies)[1], f"{action} is over")
        thread.join()
        return replies[0]


@pytest.fixture(scope="module")
def other() -> Iterator[OtherUser]:
    state = Path(tempfile.mkdtemp(prefix="t-", dir=warm.TEMPORARY))
    os.chown(state, NOBODY, NOBODY)
    user = OtherUser(state)
    yield user
    user.process.communicate()
    shutil.rmtree(state)


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A file of this user that must not change."""
    path = tmp_path / "precious"
    path.write_bytes(bytes(LINE_BYTES))
    path.chmod(0o600)
    before = path.stat()
    yield path
    after = path.stat()
    assert path.read_bytes() == bytes(LINE_BYTES)
    assert (after.st_mode, after.st_mtime_ns, after.st_size) == (before.st_mode, before.st_mtime_ns, before.st_size)


def plant_link(path: Path, target: Path) -> None:
    path.symlink_to(target)
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def plant_file(path: Path, target: Path) -> None:
    path.write_bytes(target.read_bytes())
    os.chown(path, NOBODY, NOBODY)


def plant_fifo(path: Path, target: Path) -> None:
    del target
    os.mkfifo(path)
    os.chown(path, NOBODY, NOBODY)


PLANTS = [plant_link, plant_file, plant_fifo]


class TestLoopback:
    def test_a_worker_gets_no_configuration_and_no_weights(
        self, other: OtherUser, make_entrance: Callable[..., Entrance]
    ) -> None:
        entrance = make_entrance("CartPole-v1")
        address, step = entrance.gateway.server.address, lambda: entrance.gateway.step(0.01)
        code, text = other.ask_while("work", address, step)
        last = text.splitlines()[-1]
        assert code == 1 and "refuses the handshake" in last and "Set ECHELON_SECRET to the same value" in last, text
        assert other.ask_while("speak", address, step) == 0
        assert entrance.arrive() is not None and entrance.gateway.worker_registry.num_active == 1

    def test_a_member_joins_no_world_and_calls_nothing(self, other: OtherUser) -> None:
        with World("m0", 0, 1, address="tcp://127.0.0.1:0") as world:
            reply = other.ask("join", world.address)
            assert reply.startswith("Refused: ") and "does not admit 'stranger'" in reply and "ECHELON_SECRET" in reply
            assert other.ask("speak", world.address) == 0
            assert world.members == ["m0"]

    def test_the_secret_the_session_and_the_run_folder_cannot_be_read(self, other: OtherUser) -> None:
        place = Path(tempfile.mkdtemp(prefix="t-", dir=warm.TEMPORARY))
        place.chmod(0o755)
        try:
            user_secret()
            session, run = create_session(str(place)), RunFolder.create(place / "run")
            run.write_config({})
            for path in (secret_file(), session / OWNER, run.path / "config.json"):
                assert path.is_file() and other.ask("read", path) == "PermissionError"
        finally:
            shutil.rmtree(place)


class TestPlanted:
    """Another user has put something at a name that a process opens."""

    @pytest.mark.parametrize("plant", PLANTS)
    def test_the_segment_of_a_line_is_refused(self, plant: Callable[..., None], shm_dir: Path, precious: Path) -> None:
        plant(shm_dir / "line", precious)
        with pytest.raises(Refused, match=r"line is refused: .*Another user"):
            LineReader(shm_dir, "line")
        with pytest.raises(FileExistsError):
            LineWriter(shm_dir, "line")
        assert os.path.lexists(shm_dir / "line")

    @pytest.mark.parametrize("plant", PLANTS)
    def test_a_segment_that_many_join_is_refused(
        self, plant: Callable[..., None], shm_dir: Path, precious: Path
    ) -> None:
        plant(shm_dir / "weights", precious)
        with pytest.raises(Refused, match=r"weights is refused: .*Another user"):
            join_segment(shm_dir / "weights", LINE_BYTES)

    @pytest.mark.parametrize("plant", PLANTS)
    def test_a_doorbell_is_refused(self, plant: Callable[..., None], shm_dir: Path, precious: Path) -> None:
        plant(shm_dir / "ready", precious)
        with pytest.raises(Refused, match=r"ready is refused: .*Another user"):
            Doorbell(shm_dir / "ready")

    @pytest.mark.parametrize("plant", PLANTS)
    def test_a_nonce_proves_nothing(self, plant: Callable[..., None], shm_dir: Path) -> None:
        info = write_info(0, 1, shm_dir)
        assert info.is_near
        (shm_dir / NONCE).rename(shm_dir / "saved")
        plant(shm_dir / NONCE, shm_dir / "saved")
        assert not info.is_near

    def test_a_folder_of_another_user_or_a_link_to_one_is_not_near(self, tmp_path: Path) -> None:
        theirs, link = tmp_path / "theirs", tmp_path / "link"
        theirs.mkdir(mode=0o700)
        info: MemberInfo = write_info(0, 1, theirs)
        link.symlink_to(theirs)
        assert info.is_near and not MemberInfo(*info.to_wire()[:2], str(link), *info.to_wire()[3:]).is_near
        os.chown(theirs, NOBODY, NOBODY)
        assert not info.is_near

    @pytest.mark.parametrize("spoil", [lambda path: path.chmod(0o755), lambda path: os.chown(path, NOBODY, NOBODY)])
    def test_an_ipc_address_where_others_may_connect_or_listen_is_refused(
        self, spoil: Callable[[Path], None], shm_dir: Path
    ) -> None:
        spoil(shm_dir)
        for enter in (Node.host, Node.join):
            with pytest.raises(ConfigError, match="not a folder of this user that no other user can enter"):
                enter(f"ipc://{shm_dir}/host", "m")
        assert list(shm_dir.iterdir()) == []

    def test_doctor_sweeps_nothing_through_a_link_and_nothing_of_another_user(
        self, shm_dir: Path, tmp_path: Path, precious: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plant_link(shm_dir / session_name(DEAD_PID, "00000001"), tmp_path)
        theirs, ours = (shm_dir / session_name(DEAD_PID, word) for word in ("00000002", "00000003"))
        for folder in (theirs, ours):
            folder.mkdir(mode=0o700)
        plant_fifo(theirs / OWNER, precious)
        os.chown(theirs, NOBODY, NOBODY)
        plant_fifo(ours / OWNER, precious)  # not read: that would block
        plant_link(ours / "weights", precious)
        assert main(["doctor", "--shm-dir", str(shm_dir), "--sweep"]) == 0
        assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("removed")] == [
            str(ours)
        ]
        assert theirs.is_dir() and (shm_dir / session_name(DEAD_PID, "00000001")).is_symlink() and not ours.exists()

    def test_old_logs_of_another_user_are_kept(
        self, tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        theirs, link, ours = (tmp_path / f"echelon-host-{DEAD_PID}-{word}" for word in ("theirs", "link", "ours"))
        for folder in (theirs, ours):
            folder.mkdir(mode=0o700)
            os.utime(folder, (0, 0))
        os.chown(theirs, NOBODY, NOBODY)
        plant_link(link, precious.parent)
        os.utime(link, (0, 0), follow_symlinks=False)
        assert stat.S_IMODE(make_log_folder().stat().st_mode) == 0o700
        assert theirs.is_dir() and link.is_symlink() and not ours.exists()
