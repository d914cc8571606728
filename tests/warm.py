"""Python processes that find torch and echelon imported: forked from one warm process instead of started afresh.

`Popen` and `run` are those of subprocess, except that a Python command with OMP_NUM_THREADS=1 is forked from the warm
process of this test run. It gets its own arguments, environment, folder, search path, files and session, and runs as
`python` would run it. A test of what a fresh interpreter does uses `subprocess` itself.

The warm process (warm_guard.py) is started by pytest's first process and guards the test run, too: when that one ends,
however it ends, whatever the run has started is killed and its shared memory removed.
"""

from __future__ import annotations

import inspect
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.engines.local import ROLE_ENVIRONMENT

MARK = "ECHELON_TEST_RUN"  # in the environment of every process of one scene: so those left behind are found
SESSION = "ECHELON_TEST_SESSION"  # in that of every process of a test run: the folder of the run
PLACE_FOR_MARK = "." * 64
READ_ON_IMPORT = ("CUDA", "KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_")
MAY_DIFFER = {"PYTHONPATH", "PYTHONUNBUFFERED", *ROLE_ENVIRONMENT}  # where the threads are one
GUARD = Path(__file__).with_name("warm_guard.py")
INTO_HOST = ["-U", "--preserve-credentials", "-n"]  # of nsenter: into the network of another host, see hosts.py
TEMPORARY = "/dev/shm"  # short, as sockets lie below it


def session() -> Path:
    """The folder of this test run, in shared memory."""
    return Path(os.environ[SESSION])


class Popen(subprocess.Popen[Any]):
    """A process as of subprocess.Popen, forked from the warm one where its command and environment allow that."""

    host = 0  # the process whose network namespace this process is in; 0 if in that of the tests
    _connection: socket.socket | None = None
    _unheard: set[Popen] = set()  # noqa: RUF012  (of this process, and not known to have ended)

    def _execute_child(self, *arguments: Any) -> None:
        asked = inspect.signature(subprocess.Popen._execute_child).bind(self, *arguments).arguments
        words = [asked["args"]] if isinstance(asked["args"], str) else [os.fspath(word) for word in asked["args"]]
        host, words = (int(words[2]), words[6:]) if words[3:6] == INTO_HOST else (Popen.host, words)
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        if not can_be_forked(words, environment):
            return super()._execute_child(*arguments)
        streams = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        inherited = [own if given == -1 else given for own, given in enumerate(streams)]
        request = {
            "host": host,
            "words": words[1:],
            "environment": environment,
            "folder": os.path.abspath(asked["cwd"] or os.getcwd()),
            "new_session": asked["start_new_session"],
            "files": [0, 1, 2, *asked["pass_fds"]],
        }
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(session() / "warm"))
        send(self._connection, request, [*inherited, *asked["pass_fds"]])
        self.pid = int(receive(self._connection)[0]["pid"])
        self._child_created = True
        Popen._unheard.add(self)
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in names))

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(wait_flags)
        if wait_flags & os.WNOHANG and not select.select([self._connection], [], [], 0.0)[0]:
            return 0, 0
        status = int(receive(self._connection)[0]["status"])
        self._connection.close()  # it may be reaped
        Popen._unheard.discard(self)
        return self.pid, status

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(*arguments, **options)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def read_on_import(environment: Mapping[str, str]) -> dict[str, str]:
    names = {name for name in environment if name.startswith(READ_ON_IMPORT)} - MAY_DIFFER
    return {name: environment[name] for name in names}


AT_START = read_on_import(os.environ)


def can_be_forked(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether it is Python in the environment in which the warm process has imported everything."""
    is_python = words[0] == sys.executable and read_on_import(environment) == AT_START
    return is_python and environment.get("OMP_NUM_THREADS") == "1" and SESSION in environment


def run(words: Sequence[str], *, timeout: float | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """As subprocess.run with capture_output=True and text=True."""
    pipe = subprocess.PIPE
    with Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def living() -> set[int]:
    """What this process has had forked and what still runs."""
    return {process.pid for process in list(Popen._unheard) if process.poll() is None}


def install() -> None:
    """Has this process, and those forked from it, fork fork servers, looks at environments, and runs of seeds."""
    from echelon.cli import seeds
    from echelon.engines import local
    from echelon.envs import observed

    setattr(local, "subprocess", namespace(Popen))  # noqa: B010  (it chooses the number of threads itself)
    for module in (observed, seeds):
        setattr(module, "subprocess", namespace(popen))  # noqa: B010


def namespace(start: Callable[..., Popen]) -> types.SimpleNamespace:
    """The module `subprocess`, for a module under test whose processes are started by `start`."""
    return types.SimpleNamespace(**{**vars(subprocess), "Popen": start})


def popen(words: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> Popen:
    """Starts a process with one thread of torch, as those that are forked have."""
    return Popen(words, env={**(os.environ if env is None else env), **ROLE_ENVIRONMENT}, **options)


def skip_curves() -> None:
    """Has runs of this process, and of those forked from it, draw no curve at their end: each takes 0.15 s.

    The fixture `drawn` of a test has them drawn.
    """
    from echelon.runs import report

    report.drawn_curve = lambda run_dir: None


class Guard:
    """The warm process, as whoever runs the tests sees it: it must outlive nobody, and nobody it."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="t-", dir=TEMPORARY)
        os.environ[SESSION] = folder
        os.environ["XDG_STATE_HOME"] = f"{folder}/state"  # the secret of the tests, not of whoever runs them
        os.environ.pop("ECHELON_SECRET", None)
        tests = Path(__file__).parent
        path = os.pathsep.join([str(tests.parent / "src"), str(tests), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **ROLE_ENVIRONMENT, "PYTHONPATH": path, MARK: PLACE_FOR_MARK}
        listener = socket.socket(socket.AF_UNIX)  # asked before it has imported everything, it answers later
        listener.bind(f"{folder}/warm")
        listener.listen(64)
        self.process = subprocess.Popen(
            [sys.executable, str(GUARD), folder, str(os.getpid()), str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=environment,
        )
        listener.close()
        self.left: str | None = None

    def close(self, *, at_once: bool = False) -> str:
        """Waits until every process of the test run but this one has left, and kills the others; which those were.

        With `at_once` they are not waited for. May be called twice.
        """
        if self.left is None:
            self.left, _ = self.process.communicate(None if at_once else "over")
        return self.left


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    payload = json.dumps(message).encode()
    socket.send_fds(connection, [len(payload).to_bytes(4, "little")], descriptors)
    connection.sendall(payload)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    length, descriptors, _, _ = socket.recv_fds(connection, 4, 64)
    payload, left = b"", int.from_bytes(length, "little")  # and no more: how it ended may follow at once
    while left and (more := connection.recv(left)):
        payload, left = payload + more, left - len(more)
    if left or not payload:
        raise ConnectionError("the warm process of the tests ended")
    return json.loads(payload), descriptors
