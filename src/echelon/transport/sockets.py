"""The rules of our sockets over TCP, on both sides: bounds, heartbeats, reconnecting, and why nobody answers.

Needs nothing heavier than pyzmq.
"""

from __future__ import annotations

import socket as sockets

import zmq

from echelon.errors import ConfigError
from echelon.transport.curve import Socket, secure_client
from echelon.transport.secret import SECRET_VARIABLE, numeric

QUEUED_MESSAGES = 8  # per connection and direction, where nothing else is said
HEARTBEAT_MS, SILENCE_MS = 2_000, 10_000  # a connection that is silent so long is closed
CURVE_BYTES = 64  # more than encryption adds to a frame
HANDSHAKE_BYTES = 1_024  # more than any frame of the handshake, which the limit on frames holds for, too
LINGER_MS = 200  # how long a farewell may take
RECONNECT_MS, MAX_RECONNECT_MS = 50, 1_000
FIRST_REPEAT_S, MAX_REPEAT_S = 0.25, 1.0  # when an unanswered question is sent again


def make_socket(context: zmq.Context[Socket], kind: int, max_bytes: int, queued: int = QUEUED_MESSAGES) -> Socket:
    """A socket that takes frames of at most `max_bytes`; nothing is sent on it that its queue does not hold."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, queued)
    socket.setsockopt(zmq.RCVHWM, queued)
    # libzmq hangs up on a peer that sends a longer frame.
    socket.setsockopt(zmq.MAXMSGSIZE, max(max_bytes + CURVE_BYTES, HANDSHAKE_BYTES))
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    return socket


def connect(
    address: str, secret: str | None, max_bytes: int, queued: int = QUEUED_MESSAGES, name: bytes = b""
) -> Socket:
    """A client's socket on its way to `address`; it goes on trying for as long as it is open.

    Under its `name` the server finds it again, whichever of them was lost meanwhile; without one it gets one.
    """
    socket = make_socket(zmq.Context.instance(), zmq.DEALER, max_bytes, queued)
    if name:
        socket.setsockopt(zmq.ROUTING_ID, name)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
    if secret is not None:
        secure_client(socket, secret)
    try:
        socket.connect(numeric(address))
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"cannot connect to {address}: {error}. Write tcp://HOST:PORT.") from error
    return socket


def why_silent(address: str) -> str:
    """What keeps us from the server at `address`, as far as can be seen from here, and what to do."""
    host, _, port = numeric(address).removeprefix("tcp://").rpartition(":")
    try:
        sockets.create_connection((host, int(port)), timeout=1.0).close()
    except (OSError, ValueError) as error:
        return f"nobody listens there ({error}). Start it, or check the address and the firewall between."
    return (
        f"somebody listens there, but does not let us in, or is busy. Set {SECRET_VARIABLE} to the same value on both "
        "sides, or on neither."
    )
