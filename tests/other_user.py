"""What another local user does: a process that becomes nobody and obeys the lines of its standard input.

Nobody may be unable to read the code, so every action is rehearsed before, as the user of the tests: that imports it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from echelon.cli.main import main
from echelon.errors import EchelonError
from echelon.transport.channel import Kind, header
from echelon.transport.curve import secure_client
from echelon.transport.episode_wire import TASK, TaskRequest, pack
from echelon.version import __version__
from echelon.world import World

NOBODY = 65534
NOWHERE = "tcp://127.0.0.1:1"


def work(address: str, patience_s: float = 30.0) -> tuple[int, str]:
    """Runs `echelon worker`; returns its exit code and what it wrote."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main(["worker", "--learner", address, "--patience", str(patience_s), "--episodes", "1"])
    return code, output.getvalue()


def join(address: str, timeout_s: float = 30.0) -> str:
    """Joins the world at `address`; returns how that ended."""
    try:
        with World("stranger", address=address, timeout_s=timeout_s) as world:
            return f"joined {world.members}"
    except EchelonError as error:
        return f"{type(error).__name__}: {error}"


def speak(address: str) -> int:
    """Requests a worker's task without keys, and with those of another secret; returns the number of replies."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in range(2)]
    secure_client(sockets[1], "a secret of somebody else")
    for socket in sockets:
        socket.connect(address)
        with contextlib.suppress(zmq.Again):  # it was refused before it could send
            socket.send_multipart([header(Kind.ASK, TASK, 1), *pack(TaskRequest(__version__))], zmq.NOBLOCK)
    end, num = time.monotonic() + 0.5, 0
    while time.monotonic() < end:
        num += sum(bool(socket.poll(20)) and bool(socket.recv_multipart()) for socket in sockets)
    context.destroy(linger=0)
    return num


def read(path: str) -> str:
    """Returns the content of a file, or the kind of error."""
    try:
        return Path(path).read_text()
    except OSError as error:
        return type(error).__name__


def obey() -> None:
    actions: dict[str, Any] = {"work": work, "join": join, "speak": speak, "read": read}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECHELON_SECRET", "a secret of the rehearsal")
        join(NOWHERE, 0.01)
        work(NOWHERE, 0.01)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    for line in sys.stdin:
        action, argument = json.loads(line)
        print(json.dumps(actions[action](argument)), flush=True)


if __name__ == "__main__":
    obey()
