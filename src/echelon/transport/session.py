"""A session: the private folder that holds everything one run stores in shared memory.

Segments, doorbells and sockets of a run are in one folder under `shm_dir`, owned by the process that created it. The
process that ends the run removes the folder; if that process was killed, the fork server or the next `sweep` removes
it. The folder's name contains the owner's pid and PID namespace, because containers that share the mount may have
separate PID namespaces.
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

from echelon.disk import is_private, open_own
from echelon.errors import ConfigError

NAME = re.compile(r"echelon-(?P<pid>\d+)-(?P<namespace>[0-9a-f]+)-[0-9a-f]{8}")
OWNER = "owner.json"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A session folder whose owner is dead."""

    path: Path
    owner_pid: int
    nbytes: int


def start_ticks(pid: int) -> int | None:
    """Returns when process `pid` started, in clock ticks since boot, to detect a reused pid; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def is_running(pid: int, ticks: int | None) -> bool:
    """Returns whether the process with this pid and this start time is still running."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return ticks is not None and int(fields[19]) == ticks and fields[0] not in "ZX"


def pid_namespace() -> str | None:
    """Returns this process's PID namespace: containers that share a mount may not share pids."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def session_name(pid: int, word: str) -> str:
    """Returns the name of a session folder of process `pid`; `word`, 8 hexadecimal digits, makes it unique."""
    return f"echelon-{pid}-{_namespace()}-{word}"


def _namespace() -> str:
    """Returns a short form of `pid_namespace` for socket paths. Linux numbers namespaces from 0xf0000000."""
    number = re.search(r"\d+", pid_namespace() or "0")
    return f"{int(number[0]) & 0xFFFFFF:x}" if number else "0"


def create_session(shm_dir: str) -> Path:
    """Creates a session folder under `shm_dir`, after removing the folders that dead runs left there."""
    root = Path(shm_dir)
    if not root.is_dir() or not os.access(root, os.W_OK):
        raise ConfigError(f"shm_dir={shm_dir} is not a writable folder. Use another --shm-dir.")
    sweep(shm_dir)
    path = root / session_name(os.getpid(), secrets.token_hex(4))
    owner = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    try:
        path.mkdir(mode=0o700)
        (path / OWNER).write_text(json.dumps(owner))
    except BaseException as error:  # KeyboardInterrupt included: nothing else would remove the folder
        shutil.rmtree(path, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise ConfigError(f"shm_dir={shm_dir} has no room for a run: {error}. Use another --shm-dir.") from error
    return path


def leftovers(shm_dir: str) -> list[Leftover]:
    """Returns the session folders of this user under `shm_dir` whose owner is dead."""
    found = []
    for path in sorted(Path(shm_dir).glob("echelon-*")):
        name = NAME.fullmatch(path.name)
        if name is None or not is_private(path):
            continue  # not a session of this user
        if name["namespace"] != _namespace():
            continue  # of another container: its pids mean nothing here
        try:
            with open(open_own(path / OWNER, os.O_RDONLY)) as file:
                owner = json.load(file)
            pid, ticks, owned = int(owner["pid"]), owner["start_ticks"], True
        except (OSError, ValueError, KeyError, TypeError):
            # It is being created, is damaged, or is a rendezvous folder of sibling processes, which may outlive the
            # parent that it is named after.
            pid, ticks, owned = int(name["pid"]), None, False
        started = start_ticks(pid)
        if (started is None or ticks not in (None, started)) and (owned or not _is_open(path)):
            found.append(Leftover(path, pid, _num_bytes(path)))
    return found


def is_taken(path: Path) -> bool:
    """Returns whether a process listens on the socket file `path`."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # the listener is suspended and its backlog is full
            return True
        except OSError:
            return False
        return True


def _is_open(path: Path) -> bool:
    """Returns whether a process listens on a socket in the folder."""
    with contextlib.suppress(FileNotFoundError):  # another run is sweeping too
        return any(is_taken(entry) for entry in path.iterdir() if entry.is_socket())
    return False


def _num_bytes(path: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):  # another run is sweeping too
        for entry in path.rglob("*"):
            total += entry.lstat().st_size
    return total


def sweep(shm_dir: str) -> list[Leftover]:
    """Removes the session folders that dead runs left under `shm_dir`; returns them."""
    found = leftovers(shm_dir)
    for leftover in found:
        shutil.rmtree(leftover.path, ignore_errors=True)
    return found
