"""Authentication over TCP: CURVE keys derived from one secret, and the gate that admits only their holders.

The keypairs of the server and of the clients are both derived from the secret (`secret.py`). A process with the secret
can take either side; a process without it fails the handshake: a client with another secret does not have the server's
public key, and a client without a secret uses another mechanism.
"""

from __future__ import annotations

import hmac
from contextlib import suppress
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from echelon.transport.connections import Connections
from echelon.transport.secret import stretched

DOMAIN = "echelon"
ZAP_ADDRESS = "inproc://zeromq.zap.01"  # libzmq sends authentication requests here; one per context

Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True)
class Keypair:
    """A CURVE keypair, both halves in Z85, the encoding that libzmq expects."""

    public: bytes
    private: bytes

    def __repr__(self) -> str:
        return f"Keypair(public={self.public!r})"  # keeps the private half out of logs


def keypair(secret: str, side: str) -> Keypair:
    """Returns the keypair of one `side`, "server" or "client"; the same secret gives the same keypair on every host."""
    private = z85.encode(hmac.digest(stretched(secret), side.encode(), "sha256"))
    return Keypair(zmq.curve_public(private), private)


def secure_client(socket: Socket, secret: str) -> None:
    """Gives `socket` the client's keys of this secret. Call it before the socket connects."""
    own = keypair(secret, "client")
    socket.setsockopt(zmq.CURVE_SERVERKEY, keypair(secret, "server").public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.private)


def secure_server(socket: Socket, secret: str, most_unread: int | None = None) -> Gate:
    """Makes `socket` admit only clients with this secret. Call it before the socket binds.

    Clients are admitted only while the returned gate is served; `most_unread` bounds the bytes of each of them that
    are in no finished message.
    """
    admit(socket, secret)
    return Gate(socket, keypair(secret, "client").public, most_unread)


def admit(socket: Socket, secret: str) -> None:
    """Makes `socket` admit only clients with this secret, through the existing gate of its context.

    Call it before the socket binds.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keypair(secret, "server").private)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)


class Gate:
    """Answers libzmq's authentication requests (ZAP, RFC 27), counts refused connections, and bounds the others.

    It has no thread: its owner polls `descriptors` together with its other file descriptors and calls `serve` when one
    of them is readable. Until then a new connection waits, and libzmq closes it after 30 s; established connections are
    not affected. A context has one gate, because the address of the requests is fixed.
    """

    def __init__(self, socket: Socket, admitted: bytes, most_unread: int | None = None) -> None:
        """Admits clients with the public key `admitted`."""
        self.connections = Connections(socket, most_unread)
        self._num_refused = 0
        self._admitted = z85.decode(admitted)
        self._requests: Socket = socket.context.socket(zmq.ROUTER)
        self._requests.setsockopt(zmq.LINGER, 0)
        self._requests.bind(ZAP_ADDRESS)
        self.descriptors = [int(self._requests.getsockopt(zmq.FD)), self.connections.descriptor]

    @property
    def num_refused(self) -> int:
        """The number of refused handshakes."""
        return self._num_refused + self.connections.num_failed

    def serve(self) -> list[str]:
        """Answers all pending requests; it must read them all, because `descriptors` are edge-triggered.

        Returns why connections were closed, if any were.
        """
        with suppress(zmq.Again):
            while True:
                self._answer(self._requests.recv_multipart(zmq.NOBLOCK))
        return self.connections.serve()

    def _answer(self, frames: list[bytes]) -> None:
        route, _, _, number, domain, _, _, mechanism, *credentials = frames
        known = (
            mechanism == b"CURVE"
            and domain == DOMAIN.encode()
            and hmac.compare_digest(b"".join(credentials), self._admitted)
        )
        self._num_refused += not known
        verdict = [b"200", b"OK", b"client", b""] if known else [b"400", b"not a key of this run", b"", b""]
        self._requests.send_multipart([route, b"", b"1.0", number, *verdict], zmq.NOBLOCK)

    def close(self) -> None:
        self.connections.close()
        self._requests.close(linger=0)
