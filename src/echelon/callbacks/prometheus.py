"""A callback that serves the newest metrics of a training to Prometheus, as http://HOST:PORT/metrics."""

from __future__ import annotations

import http.server
import re
import socketserver
import threading
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

from echelon.callbacks.callback import Callback, Row, Training
from echelon.errors import ConfigError
from echelon.runs.metrics import plain, scalars

COUNTERS = ("env_steps", "episodes", "updates", "dropped")
TIMEOUT_S = 5.0  # for one request: they are served one after the other
PAGES = {"/metrics": "text/plain; version=0.0.4; charset=utf-8", "/": "text/html; charset=utf-8"}  # and their types
INDEX = b'The metrics of this run are at <a href="/metrics">/metrics</a>.\n'


class Prometheus(Callback):
    """Serves metrics on `port` (0: any free one, which the console shows) of `host`, to anybody who can connect."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        if type(port) is not int or not 0 <= port < 65_536:
            raise ConfigError(
                f"Prometheus(port={port!r}) is not a port: give one of 1 to 65535, or 0 for any free one."
            )
        self.host, self.port = host, port
        self._metrics: dict[str, dict[str, float]] = {}  # the newest of each kind
        self._page = b""
        self._server: socketserver.TCPServer | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/metrics"

    def on_start(self, training: Training) -> None:
        self._run = training.folder.name
        self._show("run", {"up": 1.0})
        callback = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = TIMEOUT_S

            def do_GET(self) -> None:
                if (path := self.path.partition("?")[0]) not in PAGES:
                    self.send_error(404, "the metrics are at /metrics")
                    return
                page = callback._page if path == "/metrics" else INDEX
                self.send_response(200)
                self.send_header("Content-Type", PAGES[path])
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)

            def log_message(self, format: str, *args: Any) -> None:
                """Prints nothing: stderr belongs to the console."""

        try:
            self._server = _Server((self.host, self.port), Handler)
        except OSError as error:
            raise ConfigError(
                f"Prometheus(port={self.port}, host={self.host!r}) cannot listen there: {error}. Choose another port; "
                "0 takes any free one."
            ) from error
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.2,), name="prometheus", daemon=True).start()
        training.message(f"metrics for Prometheus: {self.url}")

    def on_update(self, training: Training, row: Row) -> None:
        logged = scalars(plain(training.logged), "callback")
        self._show("train", scalars(plain(row), "") | logged | {"env_steps": float(training.steps)})

    def on_evaluation(self, training: Training, row: Row) -> None:
        self._show("evaluation", scalars(plain(row), "evaluation"))

    def on_end(self, training: Training, summary: Row) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _show(self, kind: str, metrics: dict[str, float]) -> None:
        """Replaces the metrics of `kind`, so that those of a role that has left are gone."""
        self._metrics[kind] = metrics
        self._page = "".join(_lines(ChainMap(*self._metrics.values()), self._run)).encode()


class _Server(socketserver.TCPServer):
    """One that serves a request at a time, and that reads no names from DNS, unlike HTTPServer."""

    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing about a client that left."""


def _lines(metrics: Mapping[str, float], run: str) -> Iterator[str]:
    """Yields the text format. The shares of the roles' time are one metric with labels, every other path is a name."""
    typed: set[str] = set()
    for path, value in sorted(metrics.items()):
        parts = re.split("[/.]", path.strip("/"))
        labels = {"run": run}
        if parts[0] == "time" and len(parts) == 3:
            parts, labels = ["time_share"], {**labels, "role": parts[1], "phase": parts[2]}
        kind = "counter" if parts[-1] in COUNTERS and len(parts) == 1 else "gauge"
        name = re.sub(r"\W", "_", "_".join(["echelon", *parts, *(["total"] if kind == "counter" else [])]), flags=re.A)
        if name not in typed:
            typed.add(name)
            yield f"# TYPE {name} {kind}\n"
        shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{name}{{{shown}}} {value!r}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
