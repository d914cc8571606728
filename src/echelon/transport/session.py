"""A session: the private folder that holds everything one run puts into shared memory.

Segments, doorbells and sockets of a run lie in one folder under `shm_dir`, owned by the process that made it. Whoever
ends the run removes the folder; if that process was killed, the fork server or the next `sweep` does. The name of the
folder says whose it is, and in which namespace of process numbers: containers may share the mount, but not those.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from echelon.errors import ConfigError
from echelon.transport.secret import secret_from_environment

NAME = re.compile(r"echelon-(?P<pid>\d+)-(?P<namespace>[0-9a-f]+)-[0-9a-f]{8}")
OWNER = "owner.json"
SECRET = "secret"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A session folder whose owner is dead."""

    path: Path
    owner_pid: int
    nbytes: int


def start_ticks(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot: tells a process from a later one with its number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def is_running(pid: int, ticks: int | None) -> bool:
    """Whether the process that had this number and started then has not ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return ticks is not None and int(fields[19]) == ticks and fields[0] not in "ZX"


def pid_namespace() -> str | None:
    """Where this process's number counts: containers that share a mount do not share process numbers."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def session_name(pid: int, word: str) -> str:
    """The name of a folder of process `pid`, which tells its others apart by `word`, 8 hexadecimal digits."""
    return f"echelon-{pid}-{_namespace()}-{word}"


def _namespace() -> str:
    """A short form of `pid_namespace`: paths of sockets are short. Linux numbers namespaces from 0xf0000000 on."""
    number = re.search(r"\d+", pid_namespace() or "0")
    return f"{int(number[0]) & 0xFFFFFF:x}" if number else "0"


def create_session(shm_dir: str) -> Path:
    """A new session folder under `shm_dir`, after sweeping away what dead runs left there."""
    root = Path(shm_dir)
    if not root.is_dir() or not os.access(root, os.W_OK):
        raise ConfigError(f"shm_dir={shm_dir} is not a folder that can be written. Name another with --shm-dir.")
    sweep(shm_dir)
    path = root / session_name(os.getpid(), secrets.token_hex(4))
    owner = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    try:
        path.mkdir(mode=0o700)
        (path / OWNER).write_text(json.dumps(owner))
    except BaseException as error:  # a user's Ctrl-C among them: nobody knows of the folder yet
        shutil.rmtree(path, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise ConfigError(f"shm_dir={shm_dir} has no room for a run: {error}. Name another with --shm-dir.") from error
    return path


def make_secret(session: Path) -> None:
    """Makes a secret for a run that was given none; it lies in its session, which nobody else can read."""
    if secret_from_environment() is None:
        file = os.open(session / SECRET, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(file, "w") as secret:
            secret.write(secrets.token_hex(32))


def secret_of(session: Path) -> str:
    """What the processes of a run know each other by over TCP: ECHELON_SECRET, or what the run made for itself."""
    return secret_from_environment() or (session / SECRET).read_text()


def leftovers(shm_dir: str) -> list[Leftover]:
    """The session folders under `shm_dir` whose owner is dead."""
    found = []
    for path in sorted(Path(shm_dir).glob("echelon-*")):
        name = NAME.fullmatch(path.name)
        if name is None or not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
            continue  # not a session, or another user's
        if name["namespace"] != _namespace():
            continue  # of another container: nobody here can tell whether it lives
        try:
            owner = json.loads((path / OWNER).read_text())
            pid, ticks, owned = int(owner["pid"]), owner["start_ticks"], True
        except (OSError, ValueError, KeyError, TypeError):
            # Being made just now, damaged, or where siblings meet, who may outlive the parent that it is named after.
            pid, ticks, owned = int(name["pid"]), None, False
        started = start_ticks(pid)
        if (started is None or ticks not in (None, started)) and (owned or not _is_open(path)):
            found.append(Leftover(path, pid, _num_bytes(path)))
    return found


def is_taken(path: Path) -> bool:
    """Whether somebody listens at the socket file `path`."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # by somebody who is stopped, at whom many have knocked
            return True
        except OSError:
            return False
        return True


def _is_open(path: Path) -> bool:
    """Whether somebody listens in that folder."""
    with contextlib.suppress(FileNotFoundError):  # another run is sweeping too
        return any(is_taken(entry) for entry in path.iterdir() if entry.is_socket())
    return False


def _num_bytes(path: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):  # another run is sweeping too
        for entry in path.rglob("*"):
            total += entry.stat().st_size
    return total


def sweep(shm_dir: str) -> list[Leftover]:
    """Removes what dead runs left under `shm_dir`; says what."""
    found = leftovers(shm_dir)
    for leftover in found:
        shutil.rmtree(leftover.path, ignore_errors=True)
    return found
