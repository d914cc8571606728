"""Python processes that find torch and echelon imported: forked from one warm process instead of started afresh.

`Popen` and `run` are those of subprocess, except that a Python command with OMP_NUM_THREADS=1 is forked from the warm
process of this test run. It gets its own arguments, environment, folder, search path, files and session, and runs as
`python` would run it. A test of what a fresh interpreter does uses `subprocess` itself.

The warm process (`main`) is started by pytest's first process and guards the test run, too: when that one ends, however
it ends, whatever the run has started is killed and its shared memory removed.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MARK = "ECHELON_TEST_RUN"  # in the environment of every process of one scene: so those left behind are found
SESSION = "ECHELON_TEST_SESSION"  # in that of every process of a test run: the folder of the run
PLACE_FOR_MARK = "." * 64
THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
READ_ON_IMPORT = ("CUDA", "KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_")
MAY_DIFFER = {"PYTHONPATH", "PYTHONUNBUFFERED", *THREADS}  # where the threads are one
TEMPORARY = "/dev/shm"  # short, as sockets lie below it
USUAL_FILTERS = len(warnings.filters)


# What a test process uses.


def session() -> Path:
    """The folder of this test run, in shared memory."""
    return Path(os.environ[SESSION])


class Popen(subprocess.Popen[Any]):
    """A process as of subprocess.Popen, forked from the warm one where its command and environment allow that."""

    _connection: socket.socket | None = None
    _unheard: set[Popen] = set()  # noqa: RUF012  (of this process, and not known to have ended)

    def _execute_child(self, *arguments: Any) -> None:
        asked = inspect.signature(subprocess.Popen._execute_child).bind(self, *arguments).arguments
        words = [asked["args"]] if isinstance(asked["args"], str) else [os.fspath(word) for word in asked["args"]]
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        if not can_be_forked(words, environment):
            return super()._execute_child(*arguments)
        streams = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        inherited = [own if given == -1 else given for own, given in enumerate(streams)]
        request = {
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
    """Has local engines of this process, and of those forked from it, fork their fork servers."""
    from echelon.engines import local

    local.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": Popen})


class Guard:
    """The warm process, as whoever runs the tests sees it: it must outlive nobody, and nobody it."""

    def __init__(self, search: Sequence[str]) -> None:
        folder = tempfile.mkdtemp(prefix="t-", dir=TEMPORARY)
        os.environ[SESSION] = folder
        path = os.pathsep.join(entry for entry in search if entry)
        environment = {**os.environ, **THREADS, "PYTHONPATH": path, MARK: PLACE_FOR_MARK}
        self.process = subprocess.Popen(
            [sys.executable, __file__, folder, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=environment,
        )
        self.left: str | None = None

    def close(self) -> str:
        """Ends every process of the test run but this one; which those were. May be called twice."""
        if self.left is None:
            self.left, _ = self.process.communicate()
        return self.left


# What goes over the socket: JSON with its length before it, and descriptors.


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    payload = json.dumps(message).encode()
    socket.send_fds(connection, [len(payload).to_bytes(4, "little")], descriptors)
    connection.sendall(payload)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    length, descriptors, _, _ = socket.recv_fds(connection, 4, 64)
    payload = b""
    while len(payload) < int.from_bytes(length, "little"):
        payload += (more := connection.recv(1 << 20))
        if not more:
            break
    if not payload:
        raise ConnectionError("the warm process of the tests ended")
    return json.loads(payload), descriptors


# What the warm process does.


class Forking:
    """Forks what is asked for and tells how it ended."""

    def __init__(self, folder: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "warm"))
        self.listener.listen(64)
        self.poller = select.poll()
        self.living: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: process number, and who asked for it
        self.ended: dict[int, tuple[int, socket.socket]] = {}  # by connection: those who have not been waited for

    def serve(self) -> Request | None:
        """In a child, what it is to become; in the warm process None, when its starter has gone."""
        for descriptor in (0, self.listener.fileno()):
            self.poller.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in self.poller.poll():
                if descriptor == 0:
                    return None
                if descriptor == self.listener.fileno():
                    if (request := self._fork()) is not None:
                        return request
                elif descriptor in self.living:
                    self._tell(descriptor)
                else:
                    self._reap(descriptor)

    def _fork(self) -> Request | None:
        connection, _ = self.listener.accept()
        try:
            request, given = receive(connection)
        except ConnectionError:  # it was killed while it asked
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            self._leave(connection)
            return Request(**request, given=given)
        for descriptor in given:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        self.living[pidfd] = pid, connection
        self.poller.register(pidfd, select.POLLIN)
        with contextlib.suppress(ConnectionError):
            send(connection, {"pid": pid})
        return None

    def _leave(self, *connections: socket.socket) -> None:
        """In a child: closes what is the warm process's."""
        for pidfd in self.living:
            os.close(pidfd)
        others = (connection for _, connection in (*self.living.values(), *self.ended.values()))
        for one in (self.listener, *connections, *others):
            one.close()

    def _tell(self, pidfd: int) -> None:
        self.poller.unregister(pidfd)
        pid, connection = self.living.pop(pidfd)
        found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        os.close(pidfd)
        self.ended[connection.fileno()] = pid, connection
        self.poller.register(connection, select.POLLIN)  # closed once it has been waited for, or nobody will
        with contextlib.suppress(ConnectionError):
            status = found.si_status << 8 if found.si_code == os.CLD_EXITED else found.si_status
            send(connection, {"status": status})

    def _reap(self, descriptor: int) -> None:
        self.poller.unregister(descriptor)
        pid, connection = self.ended.pop(descriptor)
        connection.close()
        os.waitpid(pid, 0)


@dataclass
class Request:
    """What a forked process is to be."""

    words: list[str]  # as after `python`
    environment: dict[str, str]
    folder: str
    new_session: bool
    files: list[int]  # the numbers that `given` are to have
    given: list[int]

    def become(self, search: Sequence[str]) -> None:
        """Runs the command in this process, whose search path ends with `search`, as the interpreter would."""
        if self.new_session:
            os.setsid()
        apart = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 512) for descriptor in self.given]
        for descriptor in self.given:
            os.close(descriptor)
        for descriptor, number in zip(apart, self.files, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(self.folder)
        write_mark(self.environment.get(MARK, ""))
        os.environ.clear()
        os.environ.update(self.environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        np.random.seed()  # as every process has another
        gc.unfreeze()
        words = list(self.words)
        if words[0] == "-W":
            sys.warnoptions.append(words[1])
            warnings.simplefilter(words[1])  # before the usual ones, and behind those of the modules
            warnings.filters.insert(len(warnings.filters) - 1 - USUAL_FILTERS, warnings.filters.pop(0))
            del words[:2]
        paths = [entry for entry in self.environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
        main = types.ModuleType("__main__")
        main.__builtins__ = builtins
        sys.modules["__main__"] = main
        if words[0] == "-m":
            sys.argv = ["-m", *words[2:]]
            sys.path[:] = [os.getcwd(), *paths, *search]
            sys.modules.pop(words[1], None)
            runpy._run_module_as_main(words[1])
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.path[:] = ["", *paths, *search]
            exec(words[1], main.__dict__)
        else:
            sys.argv = words
            sys.path[:] = [os.path.dirname(os.path.realpath(words[0])), *paths, *search]
            main.__file__ = words[0]
            exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)


def write_mark(mark: str) -> None:
    """Puts `mark` where /proc/PID/environ shows it: that is the memory the process was started with."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    place = libc.getenv(MARK.encode())
    ctypes.memmove(place, mark.encode().ljust(len(PLACE_FOR_MARK), b"\0"), len(PLACE_FOR_MARK))


def processes_of(folder: str) -> list[int]:
    """Those of the test run in `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if f"{SESSION}={folder}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def clear(folder: Path, starter: int) -> list[str]:
    """Kills what is left of a test run and removes its shared memory; returns what that was."""
    left: dict[int, str] = {}
    while more := [pid for pid in processes_of(str(folder)) if pid not in (os.getpid(), starter)]:
        for pid in more:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                left.setdefault(pid, f"{Path(f'/proc/{pid}/comm').read_text().strip()} ({words.strip()})")
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for pid in {os.getpid(), starter, *left}:
        for path in Path(TEMPORARY).glob(f"echelon-{pid}-*"):
            shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    return [f"process {pid}, {what}" for pid, what in left.items()]


def preload() -> None:
    """Imports what processes of the tests import."""
    import echelon

    for name in ("torch._dynamo", "gymnasium.envs.classic_control"):
        importlib.import_module(name)
    for module in pkgutil.walk_packages(echelon.__path__, "echelon."):
        with contextlib.suppress(ImportError):  # what is optional
            importlib.import_module(module.name)


def main() -> None:
    folder, starter = Path(sys.argv[1]), int(sys.argv[2])
    search = [entry for entry in sys.path[1:] if entry not in os.environ["PYTHONPATH"].split(os.pathsep)]
    forking = Forking(folder)
    preload()
    install()
    gc.collect()
    gc.freeze()  # what is imported is nobody's garbage
    request = forking.serve()
    if request is None:
        print("\n".join(clear(folder, starter)))
    else:
        request.become(search)


if __name__ == "__main__":
    main()
