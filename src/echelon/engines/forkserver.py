"""The fork server: a small process that has imported the heavy modules and forks role processes in milliseconds.

It exchanges JSON lines with the engine that started it over one Unix socket: it receives `start` and `signal`, and
sends `started` and `exited`. Role processes are its children, so it alone reaps them, and a pid that the engine knows
is not reused before the server has reported the exit. When the socket closes without a `close` (the engine's process
was killed), it kills its children and removes the session folder. A role process leads a process group, which is killed
with it, so that processes started by its environments end, too. If the server itself is killed, the kernel kills its
children (PR_SET_PDEATHSIG), and its spare takes over: an idle copy of the server, forked after the imports, which
shares its memory and spares the run the seconds that a new interpreter needs to import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import importlib
import io
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

from echelon.disk import open_regular
from echelon.engines.process import IDLE, INHERITED, Failure, ProcessSpec, Role, failure_of, make_role, run_role
from echelon.transport.session import is_running, start_ticks

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
MAX_FAILURE_BYTES = 60_000  # under the 64 KiB a pipe holds, so a failing process never blocks on it
COORDINATOR_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
ENGINE_END_S = 1.0  # from the end of an engine's connections to the end of its process
SERVE, END = b"s", b"e"  # orders to a spare
CLOSE_TIMEOUT_S = 0.3  # how long a failed role may take to close: its error waits for that


@dataclass(slots=True)
class RoleProcess:
    name: str
    pid: int
    pidfd: int
    failure_pipe: int


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def leave_signals_to_coordinator() -> None:
    """Ignores SIGTERM and SIGHUP in this process: a service manager sends them to every process of a run.

    The coordinator handles them: it stops the run with a final checkpoint. Children of this process, such as those of
    an environment, do not inherit this: they end by these signals as usual.
    """
    for number in COORDINATOR_SIGNALS:
        signal.signal(number, lambda number, frame: None)  # not SIG_IGN, which programs started from here would inherit
    # Blocked during a fork: a child that is ended right then must not lose the signal to the handler it inherits.
    os.register_at_fork(before=_block_signals, after_in_parent=_restore_mask, after_in_child=_restore_signals)


_masks: list[set[int]] = []  # signal masks before the forks under way, one per registration of the hooks


def _block_signals() -> None:
    _masks.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, COORDINATOR_SIGNALS)))


def _restore_mask() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())


def _restore_signals() -> None:
    for number in COORDINATOR_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _restore_mask()


def fork_blocked() -> int:
    """Forks; the child receives SIGTERM and SIGHUP only after `unblock_signals`: it sets its handlers first."""
    signal.pthread_sigmask(signal.SIG_BLOCK, COORDINATOR_SIGNALS)
    if pid := os.fork():
        unblock_signals()
    return pid


def unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, COORDINATOR_SIGNALS)


def open_log(path: str) -> int:
    """Opens the log of a role; if that is not possible, as on a full disk or where a link is, it works without."""
    try:
        return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


class LogFile(io.FileIO):
    """A log that drops what cannot be written: a print of a role must not fail because the disk is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def open_stream(descriptor: int, spec: ProcessSpec) -> TextIO:
    """Returns a text stream for the standard output or errors of a role."""
    if spec.log == INHERITED:
        return os.fdopen(descriptor, "w", buffering=1, closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(LogFile(descriptor, "w", closefd=False)), line_buffering=True)


def work(spec: ProcessSpec, failure_pipe: int, parent: int) -> NoReturn:
    """Runs the role of `spec` in a forked process; does not return."""
    die_with_parent(parent)
    ctypes.CDLL(None).prctl(PR_SET_NAME, spec.name.encode()[:15])  # what `top` and `ps -o comm` show
    os.setpgid(0, 0)  # killed together with its children; not a session: autogroups schedule per session
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle
    if not spec.ends_by_signals:
        leave_signals_to_coordinator()
    unblock_signals()
    if spec.log != INHERITED:
        log = open_log(spec.log)
        os.dup2(log, 1)
        os.dup2(log, 2)
    sys.stdout = open_stream(1, spec)
    sys.stderr = open_stream(2, spec)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    if spec.nice == IDLE:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    elif spec.nice:
        os.nice(spec.nice)
    code = 0
    role: Role | None = None
    try:
        role = make_role(spec)
        run_role(role)
    except BaseException as error:  # the last frame of the process: report whatever ended it
        code = 1
        failure = failure_of(error)
        if spec.log != INHERITED:  # else the process that started it prints the error
            print(failure.traceback, file=sys.stderr)
        os.write(failure_pipe, pack_failure(failure))
        signal.setitimer(signal.ITIMER_REAL, CLOSE_TIMEOUT_S)  # SIGALRM ends a process that cannot even close
    try:
        if role is not None:
            role.close()
    except BaseException:  # its work is over, and the error that ended it is reported
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def pack_failure(failure: Failure) -> bytes:
    """Returns `failure` as JSON of at most MAX_FAILURE_BYTES: the head of its message, the tail of its traceback."""
    keep = MAX_FAILURE_BYTES
    while True:
        short = dataclasses.replace(failure, message=failure.message[:keep], traceback=failure.traceback[-keep:])
        payload = json.dumps(dataclasses.asdict(short)).encode()
        if len(payload) <= MAX_FAILURE_BYTES:
            return payload
        keep //= 2


def unpack_failure(pipe: int) -> dict[str, Any] | None:
    """Returns the failure that a dead process wrote to its pipe; None if there is none or it is incomplete."""
    try:
        failure: dict[str, Any] = json.loads(os.read(pipe, MAX_FAILURE_BYTES))
    except (BlockingIOError, ValueError):  # empty, while a child of it holds the pipe open; or cut short
        return None
    return failure


class ForkServer:
    """Forks role processes on request and reports their exits."""

    def __init__(self, control: socket.socket, session: str, engine: int) -> None:
        self.control, self.session, self.engine = control, session, engine
        self.processes: dict[int, RoleProcess] = {}  # by pidfd
        self.buffer = b""

    def run(self) -> None:
        self._send(event="serving", pid=os.getpid())
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll():
                if descriptor == self.control.fileno():
                    for request in self._requests():
                        if request["do"] == "start":
                            poller.register(self._start(ProcessSpec(**request["spec"])), select.POLLIN)
                        elif request["do"] == "signal":
                            self._signal(request["name"], request["number"])
                        else:
                            self._abandon(remove_session=request["do"] == "lost" and has_ended(self.engine))
                            return
                elif descriptor in self.processes:
                    poller.unregister(descriptor)
                    self._reap(self.processes.pop(descriptor))

    def _requests(self) -> list[dict[str, Any]]:
        try:
            data = self.control.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            return [{"do": "lost"}]
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(ConnectionError):  # the engine has ended; the next read finds that
            self.control.sendall(json.dumps(message).encode() + b"\n")

    def _start(self, spec: ProcessSpec) -> int:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        parent = os.getpid()
        pid = fork_blocked()
        if pid == 0:
            self.control.close()
            os.close(reader)
            for process in self.processes.values():
                os.close(process.pidfd)
                os.close(process.failure_pipe)
            gc.unfreeze()
            work(spec, writer, parent)
        os.close(writer)
        pidfd = os.pidfd_open(pid)
        self.processes[pidfd] = RoleProcess(spec.name, pid, pidfd, reader)
        self._send(event="started", name=spec.name, pid=pid)
        return pidfd

    def _signal(self, name: str, number: int) -> None:
        for process in self.processes.values():
            if process.name == name:
                signal.pidfd_send_signal(process.pidfd, number)

    def _reap(self, process: RoleProcess) -> None:
        status = _end_group(process)
        failure = unpack_failure(process.failure_pipe)
        os.close(process.failure_pipe)
        os.close(process.pidfd)
        self._send(
            event="exited",
            name=process.name,
            pid=process.pid,
            code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1,
            signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            failure=failure,
        )

    def _abandon(self, *, remove_session: bool) -> None:
        for process in self.processes.values():
            signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
        for process in self.processes.values():
            _end_group(process)
        if remove_session:
            shutil.rmtree(self.session, ignore_errors=True)


def allow_descriptors() -> None:
    """Raises the limit of open files to the maximum: the server has two for every process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _end_group(process: RoleProcess) -> int:
    """Reaps a process that ended or was killed, and kills its children; returns its wait status."""
    os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED | os.WNOWAIT)  # until it is reaped, its number is not reused
    with contextlib.suppress(ProcessLookupError):  # it ended before it had a group
        os.killpg(process.pid, signal.SIGKILL)
    return os.waitpid(process.pid, 0)[1]


def serve(control: socket.socket, spare: socket.socket, session: str, engine: int) -> None:
    """Runs the fork server on `control` for the process `engine`; forks its spare first, which waits on `spare`."""
    if fork_blocked() == 0:
        control.close()
        leave_signals_to_coordinator()
        unblock_signals()
        stand_by(spare, session, engine)
        os._exit(0)
    spare.close()
    ForkServer(control, session, engine).run()


def stand_by(control: socket.socket, session: str, engine: int) -> None:
    """Waits until the server has died: the engine sends the socket of the next spare, and this process serves.

    It ends when the engine says so. If the engine was killed, it removes the session: the server may be dead, too.
    """
    order, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    if order == SERVE:
        serve(control, socket.socket(fileno=descriptors[0]), session, engine)
    elif not order and has_ended(engine):
        shutil.rmtree(session, ignore_errors=True)


def has_ended(engine: int) -> bool:
    """Returns whether the engine's process has ended; one that has just closed its sockets is given a moment.

    A living engine closes the connection to a spare that was too slow to serve, and goes on with another server.
    """
    deadline = time.monotonic() + ENGINE_END_S
    while is_running(engine, start_ticks(engine)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def main() -> None:
    control, spare, session, engine, *preload = sys.argv[1:]
    leave_signals_to_coordinator()
    allow_descriptors()
    for module in preload:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # excludes what was imported from garbage collection, so that forks keep sharing its pages
    serve(socket.socket(fileno=int(control)), socket.socket(fileno=int(spare)), session, int(engine))


if __name__ == "__main__":
    main()
