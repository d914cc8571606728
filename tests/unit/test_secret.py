"""The user's secret: made once, readable by its user alone, and refused if another user may have made or read it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.errors import ConfigError
from echelon.transport.secret import MIN_SECRET_CHARACTERS, RANDOM, secret_file, stretched, user_secret


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the secret of this test is; nothing is there yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "echelon" / "secret"


def write(file: Path, content: str = "echelon-" + 64 * "0", mode: int = 0o600) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    file.chmod(mode)
    return file


def test_it_is_made_once_random_and_for_its_user_alone(file: Path) -> None:
    before = os.umask(0)
    try:
        secret = user_secret()
    finally:
        os.umask(before)
    assert RANDOM.fullmatch(secret)
    assert user_secret() == secret
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert list(file.parent.iterdir()) == [file]


def test_concurrent_first_calls_agree(file: Path) -> None:
    program = "import sys; from echelon.transport.secret import user_secret as s; sys.stdin.read(); print(s())"
    pipe = subprocess.PIPE
    first = [subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for process in first:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    assert {process.communicate(timeout=60)[0].strip() for process in first} == {user_secret()}
    assert list(file.parent.iterdir()) == [file]


def test_a_copied_file_counts_as_it_is(file: Path) -> None:
    write(file, "chosen by its user\n")
    assert user_secret() == "chosen by its user"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_reach_is_refused_with_the_remedy(file: Path, mode: int) -> None:
    write(file, mode=mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:o}.*chmod 600"):
        user_secret()


@pytest.mark.parametrize("content", ["", "\n", "fifteen letters"])
def test_a_short_one_is_refused_and_not_shown(file: Path, content: str) -> None:
    write(file, content)
    with pytest.raises(
        ConfigError, match=rf"holds {len(content.strip())} characters.*{MIN_SECRET_CHARACTERS}"
    ) as caught:
        user_secret()
    assert not content.strip() or content not in str(caught.value)


def test_links_fifos_and_folders_are_refused_without_waiting(file: Path, tmp_path: Path) -> None:
    target = write(file).rename(tmp_path / "target")
    for make in (lambda: file.symlink_to(target), lambda: os.mkfifo(file, 0o600), lambda: file.mkdir(0o700)):
        make()
        with pytest.raises(ConfigError, match=r"not a regular file.*ECHELON_SECRET"):
            user_secret()
        file.rmdir() if file.is_dir() else file.unlink()
    file.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"not a regular file.*ECHELON_SECRET"):
        user_secret()
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(write(file), 65534, 65534)
    with pytest.raises(ConfigError, match=r"a regular file of user 65534.*ECHELON_SECRET"):
        user_secret()


def test_a_home_that_cannot_be_written_asks_for_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    with pytest.raises(ConfigError, match=r"/proc/nowhere/echelon/secret.*set ECHELON_SECRET"):
        user_secret()


@pytest.mark.parametrize("state", ["", "relative/folder"])
def test_it_is_in_the_home_unless_an_absolute_place_is_named(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", state)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert secret_file() == Path("/home/somebody/.local/state/echelon/secret")


def test_a_generated_secret_is_not_stretched_and_a_chosen_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hashlib.scrypt", lambda *_, **__: b"slow")
    assert stretched("echelon-" + 64 * "1") != b"slow"
    assert stretched(64 * "1") == stretched("echelon-" + 63 * "1") == b"slow"
    stretched.cache_clear()
