"""The warm process of a test run: forks what tests start, and lets nothing outlive the run. See warm.py."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from warm import MARK, PLACE_FOR_MARK, SESSION, TEMPORARY, Popen, install, receive, send, skip_curves

LOOK_MS = 500
LEAVE_S = 30.0  # of processes that see that their starter has left, on a busy machine
KILL_S = 30.0
USUAL_FILTERS = len(warnings.filters)


class Caller:
    """Whoever runs the tests, and `make`, if that runs it: `make` that is interrupted alone would wait for its end."""

    def __init__(self, pid: int) -> None:
        self.pid, self.parent = pid, 0
        with contextlib.suppress(OSError):  # it has ended
            self.parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        self.is_heard = not self._catches_interrupts()

    def _catches_interrupts(self) -> bool:
        """Of `make`: it does so until it is interrupted."""
        try:
            status = Path(f"/proc/{self.parent}/status").read_text()
        except OSError:
            return False
        words = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        return words["Name"] == "make" and bool(int(words["SigCgt"], 16) >> signal.SIGINT - 1 & 1)

    def was_interrupted(self) -> bool:
        """Whether `make` was, since the last time this was asked."""
        if self.is_heard or self._catches_interrupts():
            return False
        self.is_heard = True
        return True


class Forking:
    """Forks what is asked for and tells how it ended."""

    def __init__(self, starter: int, listener: socket.socket) -> None:
        self.caller, self.listener = Caller(starter), listener
        self.poller = select.poll()
        self.living: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: process number, and who asked for it
        self.ended: dict[int, tuple[int, socket.socket]] = {}  # by connection: those who have not been waited for

    def serve(self) -> Request | None:
        """In a child, what it is to become; in the warm process None, when its starter has gone."""
        for descriptor in (0, self.listener.fileno()):
            self.poller.register(descriptor, select.POLLIN)
        while True:
            if self.caller.was_interrupted():
                os.kill(self.caller.pid, signal.SIGINT)
            for descriptor, _ in self.poller.poll(LOOK_MS):
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

    host: int  # a process in the network namespace that this one is to enter; 0: none
    words: list[str]  # as after `python`
    environment: dict[str, str]
    folder: str
    new_session: bool
    files: list[int]  # the numbers that `given` are to have
    given: list[int]

    def become(self, search: Sequence[str]) -> None:
        """Runs the command in this process, whose search path ends with `search`, as the interpreter would."""
        if self.host:
            enter_network_of(self.host)
            Popen.host = self.host
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
        words = list(self.words)
        if words[0] == "-W":
            sys.warnoptions.append(words[1])
            warnings.simplefilter(words[1])  # before the usual ones, and behind those of the modules
            warnings.filters.insert(len(warnings.filters) - 1 - USUAL_FILTERS, warnings.filters.pop(0))
            del words[:2]
        here = [os.getcwd()]
        if words[0] == "-P":
            del words[0], here[0]
        paths = [entry for entry in self.environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
        main = types.ModuleType("__main__")
        main.__builtins__ = builtins
        sys.modules["__main__"] = main
        if words[0] == "-m":
            sys.argv = ["-m", *words[2:]]
            sys.path[:] = [*here, *paths, *search]
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


def enter_network_of(pid: int) -> None:
    """Does what `nsenter -U --preserve-credentials -n` does; only a process with a single thread may."""
    descriptors = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("user", "net")]
    libc = ctypes.CDLL(None, use_errno=True)
    for descriptor in descriptors:
        if libc.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns into the network of process {pid}")
        os.close(descriptor)


def leave(run: Callable[[], None]) -> NoReturn:
    """Runs it and ends as the interpreter does, but does not take every module apart: that copies all their memory."""
    code: object = 0
    try:
        run()
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it; closed
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(int(code or 0) & 0xFF)


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


def clear(folder: Path, starter: int, patience_s: float) -> list[str]:
    """Kills what is left of a test run after `patience_s` and removes its shared memory; returns what that was."""
    left: dict[int, str] = {}
    spared = {os.getpid(), starter}
    deadline = time.monotonic() + patience_s
    while set(processes_of(str(folder))) - spared and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline = time.monotonic() + KILL_S
    while (more := set(processes_of(str(folder))) - spared) and time.monotonic() < deadline:
        for pid in more:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                left.setdefault(pid, f"{Path(f'/proc/{pid}/comm').read_text().strip()} ({words.strip()})")
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for pid in spared | left.keys():
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
        if select.select([0], [], [], 0.0)[0]:  # the run has ended already
            return
        with contextlib.suppress(ImportError):  # what is optional
            importlib.import_module(module.name)


def fresh_search_path() -> list[str]:
    """What an interpreter without PYTHONPATH searches behind its script's folder: here some of it came from there."""
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    told = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.path[1:], sep=chr(10))"], env=bare, capture_output=True
    )
    return told.stdout.decode().splitlines()


def main() -> None:
    folder, starter = Path(sys.argv[1]), int(sys.argv[2])
    search = fresh_search_path()
    forking = Forking(starter, socket.socket(fileno=int(sys.argv[3])))
    preload()
    install()
    skip_curves()
    gc.collect()
    gc.freeze()  # forks share what is imported until they write to it, and a collection writes to all it looks at
    request = forking.serve()
    if request is None:
        is_over = os.read(0, 4) == b"over"  # else it was interrupted or killed
        print("\n".join(clear(folder, starter, LEAVE_S if is_over else 0.0)))
    else:
        leave(lambda: request.become(search))


if __name__ == "__main__":
    main()
