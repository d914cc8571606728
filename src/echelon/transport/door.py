"""A door: where messages of other hosts come in, from anybody at all, and where the answers go out.

It listens on one ROUTER socket, off the loopback only with a secret, and lets in whom the gate admits (`curve`). Its
owner reads with `receive` until there is nothing more, sleeps with `sleep`, and answers with `send`; one thread does
all of it. What bounds it: a queue for each connection and a longest frame; where a peer takes nothing in, its answers
are dropped, and it asks again if it lives. Whoever breaks the rules is refused: nothing more is read from that
connection. If the owner dies, clients' connections heal once its successor listens at the same address.

Needs nothing heavier than pyzmq.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from echelon.errors import ConfigError
from echelon.transport.curve import Socket, secure_server
from echelon.transport.secret import check_secret, numeric
from echelon.transport.sockets import LINGER_MS, QUEUED_MESSAGES, make_socket

IGNORED_CONNECTIONS = 10_000  # the oldest are forgotten
GATE_S = 0.01  # an owner that never sleeps looks at the gate this often

Part = bytes | memoryview
Message = tuple[bytes, list[zmq.Frame]]  # the connection it came on, and its frames


class Door:
    """Messages in, answers out. A bad or hostile message is the owner's to find, and `refuse`d."""

    def __init__(
        self, what: str, address: str, secret: str | None, max_bytes: int, queued: int = QUEUED_MESSAGES
    ) -> None:
        """Listens at `address` (tcp://HOST:PORT, port 0: any free one) for `what`, in frames of at most `max_bytes`."""
        check_secret(address, secret)
        self.num_refused_messages = 0
        self._ignored: dict[bytes, None] = {}
        self._context: zmq.Context[Socket] = zmq.Context()
        self._socket = make_socket(self._context, zmq.ROUTER, max_bytes, queued)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # says so when a peer is gone
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that comes again under its name takes its place
        self._socket.setsockopt(zmq.BACKLOG, 1024)
        self._gate = secure_server(self._socket, secret) if secret is not None else None
        self._gate_at = 0.0
        try:
            self._socket.bind(numeric(address))
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot listen for {what} at {address}: {error}. Choose another address, or port 0."
            ) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._gate_descriptors = self._gate.descriptors if self._gate else []
        self._descriptors = [int(self._socket.getsockopt(zmq.FD)), *self._gate_descriptors]

    @property
    def num_refused(self) -> int:
        """Messages and handshakes that were refused."""
        return self.num_refused_messages + self.num_refused_handshakes

    @property
    def num_refused_handshakes(self) -> int:
        return self._gate.num_refused if self._gate else 0

    def receive(self) -> Message | None:
        """The next message, or None when all that came is taken in; `sleep` only then, as it announces what is new."""
        receive, noblock = self._socket.recv, zmq.NOBLOCK
        try:
            while True:
                connection = receive(noblock)
                frames = [receive(noblock, copy=False)]
                while frames[-1].more:
                    frames.append(receive(noblock, copy=False))
                if connection not in self._ignored:
                    return connection, frames
        except zmq.Again:
            return None

    def sleep(self, timeout_s: float, descriptors: Sequence[int] = ()) -> list[int]:
        """Sleeps until something comes, at most `timeout_s`; returns those of `descriptors` that are readable."""
        ready, _, _ = select.select([*self._descriptors, *descriptors], [], [], timeout_s)
        if not set(self._gate_descriptors).isdisjoint(ready):
            self._serve_gate()
        return [descriptor for descriptor in ready if descriptor in descriptors]

    def look_at_gate(self) -> None:
        """Admits those who knock, now and then: for an owner that hardly sleeps."""
        if self._gate and time.monotonic() >= self._gate_at:
            self._serve_gate()

    def _serve_gate(self) -> None:
        if self._gate:
            self._gate.serve()
            self._gate_at = time.monotonic() + GATE_S

    def refuse(self, connection: bytes, *reason: Part) -> None:
        """Takes nothing more from `connection`, and sends it the `reason` where there is one."""
        self.num_refused_messages += 1
        self._ignored[connection] = None
        if len(self._ignored) > IGNORED_CONNECTIONS:
            del self._ignored[next(iter(self._ignored))]
        if reason:
            self.send(connection, *reason)

    def send(self, connection: bytes, *parts: Part, copy: bool = True) -> bool:
        """Queues a message; False when the peer is gone, or takes nothing in. Without `copy` the parts must rest."""
        try:
            self._socket.send(connection, zmq.SNDMORE | zmq.NOBLOCK)
            for part in parts[:-1]:
                self._socket.send(part, zmq.SNDMORE | zmq.NOBLOCK, copy=copy)
            self._socket.send(parts[-1], zmq.NOBLOCK, copy=copy)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def close(self) -> None:
        if self._gate:
            self._gate.close()
        self._socket.close(linger=LINGER_MS)
        self._context.term()


def announce(file: Path, address: str) -> None:
    """Writes an address down where those who ask look for it; they find all of it or nothing."""
    whole = file.with_suffix(".new")
    whole.write_text(address)
    whole.rename(file)
