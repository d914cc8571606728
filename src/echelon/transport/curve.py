"""Who may connect over TCP: CURVE keys from one secret, and the gate that admits only their holders.

Both keypairs, the server's and the clients', come from the run's secret, so whoever has it can be either and nobody
else gets past the handshake: a client with another secret cannot even address the server, and one without a secret
speaks another mechanism. On the loopback a secret is optional; off it, it is required.
"""

from __future__ import annotations

import hmac
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85

from echelon.transport.secret import stretched

DOMAIN = "echelon"
ZAP_ADDRESS = "inproc://zeromq.zap.01"  # where libzmq asks whom to admit; one for each context
FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True)
class Keypair:
    """A CURVE keypair, both halves in Z85 as libzmq wants them."""

    public: bytes
    private: bytes

    def __repr__(self) -> str:
        return f"Keypair(public={self.public!r})"  # the private half belongs in no log


def keypair(secret: str, side: str) -> Keypair:
    """The keypair of one `side`, "server" or "client"; the same wherever the secret is the same."""
    private = z85.encode(hmac.digest(stretched(secret), side.encode(), "sha256"))
    return Keypair(zmq.curve_public(private), private)


def secure_client(socket: Socket, secret: str) -> None:
    """Makes `socket` connect as a client of this secret; before it connects."""
    own = keypair(secret, "client")
    socket.setsockopt(zmq.CURVE_SERVERKEY, keypair(secret, "server").public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.private)


def secure_server(socket: Socket, secret: str) -> Gate:
    """Makes `socket` admit only clients of this secret; before it binds. The gate must be served for any to get in."""
    gate = Gate(socket, keypair(secret, "client").public)
    admit(socket, secret)
    return gate


def admit(socket: Socket, secret: str) -> None:
    """Makes `socket` admit only clients of this secret, by the gate that its context has; before it binds."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keypair(secret, "server").private)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)


class Gate:
    """Answers libzmq's question whom to admit (ZAP, RFC 27), and counts those who were not.

    Has no thread: its owner sleeps on `descriptors` together with everything else and calls `serve` when one of them
    is readable. A connection waits for that, libzmq hangs up on it after 30 s; established ones do not notice. A
    context has one gate, since the address of the questions is fixed.
    """

    def __init__(self, socket: Socket, admitted: bytes) -> None:
        self.num_refused = 0
        self._admitted = z85.decode(admitted)
        self._questions: Socket = socket.context.socket(zmq.ROUTER)
        self._questions.setsockopt(zmq.LINGER, 0)
        self._questions.bind(ZAP_ADDRESS)
        self._guarded = socket
        self._failures: Any = socket.get_monitor_socket(FAILURES)  # handshakes that came to no question
        self.descriptors = [int(s.getsockopt(zmq.FD)) for s in (self._questions, self._failures)]

    def serve(self) -> None:
        """Answers what was asked; leaves nothing unread, as `descriptors` announce only what is new."""
        with suppress(zmq.Again):
            while True:
                self._answer(self._questions.recv_multipart(zmq.NOBLOCK))
        with suppress(zmq.Again):
            while True:
                self._failures.recv_multipart(zmq.NOBLOCK)
                self.num_refused += 1

    def _answer(self, frames: list[bytes]) -> None:
        route, _, _, number, domain, _, _, mechanism, *credentials = frames
        known = (
            mechanism == b"CURVE"
            and domain == DOMAIN.encode()
            and hmac.compare_digest(b"".join(credentials), self._admitted)
        )
        self.num_refused += not known
        verdict = [b"200", b"OK", b"client", b""] if known else [b"400", b"not a key of this run", b"", b""]
        self._questions.send_multipart([route, b"", b"1.0", number, *verdict], zmq.NOBLOCK)

    def close(self) -> None:
        self._guarded.disable_monitor()
        self._failures.close(linger=0)
        self._questions.close(linger=0)
