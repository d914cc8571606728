"""The local engine: one process per role on this machine, forked from the fork server."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from echelon.engines.forkserver import END, SERVE
from echelon.engines.inline import MessageLoop
from echelon.engines.process import CRASHES, Exit, Failure, OneHost, ProcessSpec, how_ended
from echelon.errors import RunError
from echelon.transport.session import is_running, start_ticks
from echelon.transport.store_order import check_platform

ROLE_ENVIRONMENT = {
    # Threads that wait by spinning would take the cores that other roles need.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    # Asking the driver for GPUs would initialize CUDA, which takes seconds, in a process that does not use it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}

# The first of torch's optimizers that a process creates imports torch's compiler (1.3 s): preloaded for user programs.
COMPILER = "torch._dynamo"

PROMOTION_S = 5.0  # how long a spare may take to serve
CLOSE_S = 10.0  # how long the fork server may take to leave
END_TIMEOUT_S = 10.0  # how long the kernel may take to end the roles of a fork server that was killed


class LocalEngine(OneHost):
    """Starts roles as processes of this machine.

    The fork server imports `preload` while the caller goes on; `start` does not wait for it. `session` is the folder
    that the server removes if this process is killed. If the server is killed, the kernel ends every role; `exits`
    returns them when all have ended, and at the next `start` its spare becomes the server, or, if that was killed, too,
    a new server starts.
    """

    def __init__(self, session: str, preload: Sequence[str] = ()) -> None:
        check_platform()
        self._session, self._preload = session, list(preload)
        self._asked: set[str] = set()  # requested starts that the server has not confirmed
        self._pids: dict[str, int] = {}
        self._ticks: dict[str, int | None] = {}  # when each of them started
        self._exits: list[Exit] = []
        self._spare: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | _Promoted
        self._begin()

    def _begin(self) -> None:
        """Makes the spare the fork server, or starts one if there is no spare."""
        self._buffer = b""
        ours, theirs = socket.socketpair()
        if self._spare is not None and self._promote_spare(theirs):
            self._socket = self._spare
        else:
            if self._spare is not None:  # it may be only slow, and then has the other end of these sockets
                ours.close()
                theirs.close()
                ours, theirs = socket.socketpair()
            self._start_server(theirs)
        theirs.close()
        self._spare = ours

    def _promote_spare(self, next_spare: socket.socket) -> bool:
        """Asks the spare to serve, and waits until it does; returns False if it was killed or is too slow."""
        assert self._spare is not None
        try:
            socket.send_fds(self._spare, [SERVE], [next_spare.fileno()])
            self._spare.settimeout(PROMOTION_S)
            first, _, self._buffer = self._spare.recv(1 << 20).partition(b"\n")
            self._server = _Promoted(json.loads(first)["pid"])
        except (OSError, ValueError):  # killed or suspended
            self._spare.close()
            return False
        self._spare.settimeout(None)
        return True

    def _start_server(self, spare: socket.socket) -> None:
        self._socket, theirs = socket.socketpair()
        package_root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
        path = os.pathsep.join([package_root, *(entry or os.getcwd() for entry in sys.path)])
        arguments = [str(theirs.fileno()), str(spare.fileno()), self._session, str(os.getpid()), *self._preload]
        self._server = subprocess.Popen(
            # -P: not the working directory, unless this process has it, too; it may be somebody else's run folder
            [sys.executable, "-P", "-m", "echelon.engines.forkserver", *arguments],
            pass_fds=[theirs.fileno(), spare.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**ROLE_ENVIRONMENT, **os.environ, "PYTHONPATH": path},
        )
        theirs.close()

    def _send(self, **request: Any) -> None:
        """Sends a request, and receives meanwhile: if both sides only wrote, both could block."""
        left = memoryview(json.dumps(request).encode() + b"\n")
        while left and self._is_served:
            if _events(self._socket, select.POLLIN | select.POLLOUT, None) & ~select.POLLOUT:
                self._receive(0.0)
                continue
            try:
                left = left[self._socket.send(left, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                pass
            except ConnectionError:
                self._lose_server()

    @property
    def _is_served(self) -> bool:
        return self._socket.fileno() >= 0

    def _lose_server(self) -> None:
        """Records the exits of all roles after the fork server has ended; raises RunError if it failed by itself."""
        self._socket.close()
        try:
            code = self._server.wait(5.0)
        except subprocess.TimeoutExpired:
            self._server.kill()
            code = self._server.wait()
        how = f"the fork server (process {self._server.pid}) {how_ended(code)}"
        if code >= 0 or -code in CRASHES:
            raise RunError(f"{how}, and every process with it. Its messages, if any, are above.")
        self._await_ends(how)
        for name in [*self._pids, *self._asked - set(self._pids)]:
            self._exits.append(Exit(name, self._pids.get(name, 0), -1, int(signal.SIGKILL), ended_with=how))
        self._pids.clear()
        self._asked.clear()

    def _await_ends(self, how: str) -> None:
        """Waits until the kernel has ended every role, so that no successor runs beside its predecessor."""
        deadline = time.monotonic() + END_TIMEOUT_S
        for name, pid in self._pids.items():
            with contextlib.suppress(OSError):  # ends its children as well; the group may be empty
                os.killpg(pid, signal.SIGKILL)
            while is_running(pid, self._ticks[name]):
                if time.monotonic() > deadline:
                    raise RunError(
                        f"{how}, but {name} (process {pid}) has not ended with it after {END_TIMEOUT_S:g} s: it is "
                        "stuck in the kernel."
                    )
                time.sleep(0.005)

    def start(self, spec: ProcessSpec) -> None:
        if not self._is_served:
            self._begin()
        self._asked.add(spec.name)
        self._send(do="start", spec=dataclasses.asdict(spec))

    def _receive(self, timeout_s: float) -> None:
        if not _events(self._socket, select.POLLIN, timeout_s):
            return
        try:
            data = self._socket.recv(1 << 20)
        except ConnectionError:  # it left before it had read everything
            data = b""
        if not data:
            self._lose_server()
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if (event := message.pop("event")) == "serving":
                continue
            if event == "started":
                self._asked.discard(message["name"])
                self._pids[message["name"]] = message["pid"]
                self._ticks[message["name"]] = start_ticks(message["pid"])
                continue
            if self._pids.get(message["name"]) == message["pid"]:
                del self._pids[message["name"]]
            failure = message.pop("failure")
            self._exits.append(Exit(**message, failure=Failure(**failure) if failure else None))

    def is_here(self, name: str) -> bool:
        """Whether a role of this name runs in the caller's own process."""
        del name
        return False

    @property
    def server_pid(self) -> int:
        return self._server.pid

    @property
    def descriptors(self) -> list[int]:
        """Readable when a process started or ended."""
        return [self._socket.fileno()] if self._is_served else []

    def run(self, world: MessageLoop, timeout_s: float) -> None:
        """Waits at most `timeout_s` for a message to `world` or from the fork server."""
        world.poll(timeout_s, self.descriptors)

    def exits(self) -> list[Exit]:
        if self._is_served:
            self._receive(0.0)
        exits, self._exits = self._exits, []
        return exits

    def pid(self, name: str) -> int | None:
        return self._pids.get(name)

    def signal(self, name: str, number: int) -> None:
        self._send(do="signal", name=name, number=number)

    def kill(self) -> None:
        """Kills the fork server; the kernel ends every role with it. `close` is quick then."""
        self._server.kill()

    def close(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` for the roles to exit, kills the rest, ends the server; may be called twice."""
        if self._is_served:
            self._close_server(timeout_s)
        if self._spare is not None:
            spare, self._spare = self._spare, None
            with contextlib.suppress(OSError), spare:  # it was killed, or the server before it forked one
                spare.sendall(END)
                spare.settimeout(CLOSE_S)
                spare.recv(1)  # its end closes the connection

    def _close_server(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            while self._pids and self._is_served and time.monotonic() < deadline:
                self._receive(0.05)
            if self._ticks:
                self._send(do="close")
                deadline = time.monotonic() + CLOSE_S
                while self._is_served and time.monotonic() < deadline:  # it may send many exits before it ends
                    self._receive(0.05)
            else:
                self._server.kill()  # it may still be importing; a child forked meanwhile dies with it
            self._server.wait(CLOSE_S)
        except (RunError, subprocess.TimeoutExpired):
            self._server.kill()
            self._server.wait()
        self._socket.close()


class _Promoted:
    """A fork server that was the spare of another: not a child of this process, so its exit status is unknown."""

    def __init__(self, pid: int) -> None:
        self.pid, self._ticks = pid, start_ticks(pid)

    def kill(self) -> None:
        if is_running(self.pid, self._ticks):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = CLOSE_S) -> int:
        """Waits for its end; returns the status of a killed process, for it does not fail by itself."""
        deadline = time.monotonic() + timeout
        while is_running(self.pid, self._ticks):
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork server", timeout)
            time.sleep(0.005)
        return -signal.SIGKILL


def _events(socket: socket.socket, wanted: int, timeout_s: float | None) -> int:
    """Returns which of the `wanted` events hold; unlike select, works for any descriptor number."""
    poller = select.poll()
    poller.register(socket, wanted)
    ready = poller.poll(None if timeout_s is None else 1000 * timeout_s)
    return ready[0][1] if ready else 0
