"""A Ray cluster as a run sees it: nodes that run one function each, through a driver process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from echelon.engines.process import how_ended
from echelon.errors import ConfigError
from echelon.transport.secret import SECRET_VARIABLE

CONNECT_S = 120.0  # a local cluster starts in 4 s on an idle machine
CLOSE_S = 15.0
LOG_LINES = 5


class RayCluster:
    """Connects to the cluster at `address` ("auto" or HOST:PORT), or starts a local one if it is "".

    Raises ConfigError if that fails. Ray's messages go to the file `log`. Without ECHELON_SECRET, a secret is made for
    this process, its children and the functions on other nodes, until `close`.
    """

    def __init__(self, address: str, log: Path) -> None:
        self._log, self._buffer, self._has_own_secret = log, b"", False
        package_root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
        path = os.pathsep.join([package_root, *(entry or os.getcwd() for entry in sys.path)])
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "echelon.engines.ray_driver", address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,  # Ctrl-C is for the run, which ends this process
                env={**os.environ, "PYTHONPATH": path},
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        try:
            event = self._first_event()
        except BaseException:
            self.close()
            raise
        self.ip, self.num_nodes = str(event["ip"]), int(event["nodes"])
        if not os.environ.get(SECRET_VARIABLE):
            os.environ[SECRET_VARIABLE] = f"echelon-{secrets.token_hex(32)}"
            self._has_own_secret = True

    def _first_event(self) -> dict[str, Any]:
        deadline = time.monotonic() + CONNECT_S
        while not (events := self.events(max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise ConfigError(f"Ray did not connect within {CONNECT_S:g} s: {self._last_lines()}")
        if events[0]["event"] != "connected":
            raise ConfigError(f"{events[0]['text']}.")
        return events[0]

    @property
    def descriptors(self) -> list[int]:
        """Readable when there are events."""
        return [self._output] if self._output >= 0 else []

    def start(self, entry: str, arguments: dict[str, Any]) -> None:
        """Calls the function `entry` ("module:function") on every other node, now and later, each with its name.

        It takes the main thread of a process that has the secret, until it returns {"why": text, "again": whether the
        node shall run it again}.
        """
        environment = {SECRET_VARIABLE: os.environ[SECRET_VARIABLE]}
        command = {"entry": entry, "arguments": arguments, "environment": environment}
        with contextlib.suppress(BrokenPipeError):  # `events` reports that
            os.write(self._input, json.dumps(command).encode() + b"\n")

    def events(self, timeout_s: float = 0.0) -> list[dict[str, Any]]:
        """Returns what happened: {"event": "ended", "node": name, "why": text}, and "failed" with a text at the end."""
        if self._output < 0 or not select.select([self._output], [], [], timeout_s)[0]:
            return []
        data = os.read(self._output, 1 << 16)
        if not data:
            self._output = -1
            code = self._process.wait()
            return [{"event": "failed", "text": f"Ray's driver process {how_ended(code)}: {self._last_lines()}"}]
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _last_lines(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-LOG_LINES:]) or "it has printed nothing"

    def close(self) -> None:
        """Ends the driver process, and with it every function on other nodes, and a local cluster."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        if self._has_own_secret:
            os.environ.pop(SECRET_VARIABLE, None)
