"""The local engine: one process per role on this machine, forked from a warm server."""

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

from echelon.engines.inline import World
from echelon.engines.process import Exit, Failure, ProcessSpec
from echelon.errors import RunError

# Threads that wait by spinning would take the cores that other roles need.
WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}

# torch's optimizers import its compiler when the first is made, 1.3 s: worth preloading where processes make some.
COMPILER = "torch._dynamo"


class LocalEngine:
    """Starts roles as processes of this machine.

    The fork server imports `preload` while the caller goes on; `start` returns at once. `session` is the folder that
    the server removes should this process be killed.
    """

    def __init__(self, session: str, preload: Sequence[str] = ()) -> None:
        mine, theirs = socket.socketpair()
        self._socket = mine
        self._buffer = b""
        self._asked = False
        self._pids: dict[str, int] = {}
        self._exits: list[Exit] = []
        package_root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
        path = os.pathsep.join([package_root, *(entry for entry in sys.path if entry)])
        command = [sys.executable, "-m", "echelon.engines.forkserver", str(theirs.fileno()), session, *preload]
        self._server = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**WORKER_ENVIRONMENT, **os.environ, "PYTHONPATH": path},
        )
        theirs.close()

    def _send(self, **request: Any) -> None:
        """Takes in what the server tells meanwhile: neither side may wait for the other to read."""
        left = memoryview(json.dumps(request).encode() + b"\n")
        try:
            while left:
                readable, _, _ = select.select([self._socket], [self._socket], [])
                if readable:
                    self._receive(0.0)
                with contextlib.suppress(BlockingIOError):
                    left = left[self._socket.send(left, socket.MSG_DONTWAIT) :]
        except ConnectionError as error:
            raise self._lost() from error

    def _lost(self) -> RunError:
        try:
            code = self._server.wait(5.0)
        except subprocess.TimeoutExpired:
            self._server.kill()
            code = self._server.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with code {code}"
        return RunError(
            f"the fork server (process {self._server.pid}) {how}, and every role with it. Its messages, if any, are "
            "above; the run can be resumed from its newest checkpoint."
        )

    def start(self, spec: ProcessSpec) -> None:
        self._asked = True
        self._send(do="start", spec=dataclasses.asdict(spec))

    def _receive(self, timeout_s: float) -> None:
        ready, _, _ = select.select([self._socket], [], [], timeout_s)
        if not ready:
            return
        try:
            data = self._socket.recv(1 << 20)
        except ConnectionError:  # it left before it had read everything
            data = b""
        if not data:
            raise self._lost()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message.pop("event") == "started":
                self._pids[message["name"]] = message["pid"]
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
    def descriptor(self) -> int:
        """Readable when a process started or ended."""
        return self._socket.fileno()

    def run(self, world: World, timeout_s: float) -> None:
        """Waits until something came to `world`, or the fork server tells something, at most `timeout_s`."""
        world.poll(timeout_s, [self.descriptor])

    def exits(self) -> list[Exit]:
        if self._socket.fileno() >= 0:
            self._receive(0.0)
        exits, self._exits = self._exits, []
        return exits

    def pid(self, name: str) -> int | None:
        return self._pids.get(name)

    def signal(self, name: str, number: int) -> None:
        self._send(do="signal", name=name, number=number)

    def close(self, timeout_s: float) -> None:
        """Waits `timeout_s` for the roles to leave, kills what is left, ends the server; may be called twice."""
        if self._socket.fileno() < 0:
            return
        deadline = time.monotonic() + timeout_s
        try:
            while self._pids and time.monotonic() < deadline:
                self._receive(0.05)
            if self._asked:
                self._send(do="close")
            else:
                self._server.kill()  # it may still be importing, and it has no child
            self._server.wait(10.0)
        except (RunError, subprocess.TimeoutExpired):
            self._server.kill()
            self._server.wait()
        self._socket.close()
