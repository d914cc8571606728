"""The rules of our sockets over TCP, on both sides: bounds, heartbeats, reconnecting, and why nobody answers.

Needs nothing heavier than pyzmq.
"""

from __future__ import annotations

import socket as sockets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from echelon.errors import ConfigError
from echelon.transport.curve import Socket, secure_client
from echelon.transport.secret import SECRET_VARIABLE, numeric

QUEUED_MESSAGES = 8  # per connection and direction, where nothing else is said
HEARTBEAT_MS, SILENCE_MS = 2_000, 10_000  # a connection that is silent so long is closed
CURVE_BYTES = 64  # more than encryption adds to a frame
HANDSHAKE_BYTES = 1_024  # more than any frame of the handshake, which the limit on frames holds for, too
LINGER_MS = 200  # how long a farewell may take
RECONNECT_MS, MAX_RECONNECT_MS = 50, 1_000
KNOCK_S = 1.0  # how long a listener may take to let us in or hang up
NUM_HANGUPS = 3  # in a row: one may also come from a peer that ends just then
MORE = zmq.SNDMORE | zmq.NOBLOCK  # made once: to join two flags takes longer than to use them
HUNG_UP, REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


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
    address: str,
    secret: str | None,
    max_bytes: int,
    queued: int = QUEUED_MESSAGES,
    name: bytes = b"",
    context: zmq.Context[Socket] | None = None,
) -> Socket:
    """A client's socket on its way to `address`; it goes on trying for as long as it is open.

    Under its `name` the server finds it again, whichever of them was lost meanwhile; without one it gets one.
    """
    socket = make_socket(context or zmq.Context.instance(), zmq.DEALER, max_bytes, queued)
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


def send_frames(socket: Socket, frames: Sequence[bytes | bytearray | memoryview], copy: bool = True) -> None:
    """Queues a message, or the rest of one; raises zmq.Again where there is no room for it."""
    for frame in frames[:-1]:
        socket.send(frame, MORE, copy=copy)
    socket.send(frames[-1], zmq.NOBLOCK, copy=copy)


def receive_frames(socket: Socket, flags: int = 0) -> list[memoryview]:
    """The frames of the next message, or the rest of one, where they are; raises zmq.Again where there is none."""
    part: Any = socket.recv(flags, copy=False)  # knows whether more follows: to ask the socket takes longer
    frames = [memoryview(part)]
    while part.more:
        part = socket.recv(flags, copy=False)
        frames.append(memoryview(part))
    return frames


def why_silent(address: str) -> str:
    """What keeps us from the server at `address`, as far as can be seen from here, and what to do."""
    try:
        _touch(address)
    except (OSError, ValueError) as error:
        return f"nobody listens there ({error}). Start it, or check the address and the firewall between."
    return (
        f"somebody listens there, but does not let us in, or is busy. Set {SECRET_VARIABLE} to the same value on both "
        "sides, or on neither."
    )


def _touch(address: str) -> None:
    """Connects and hangs up; raises OSError where nobody listens."""
    host, _, port = numeric(address).removeprefix("tcp://").rpartition(":")
    sockets.create_connection((host, int(port)), timeout=1.0).close()


def is_turned_away(address: str, secret: str | None) -> bool:
    """Whether whoever listens at the tcp `address` hangs up on us: only one of us has a secret, or they differ."""
    try:
        _touch(address)
    except (OSError, ValueError):  # nobody listens
        return False
    context: zmq.Context[Socket] = zmq.Context()
    knock = make_socket(context, zmq.DEALER, HANDSHAKE_BYTES)
    if secret is not None:
        secure_client(knock, secret)
    monitor: Any = knock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | HUNG_UP | REFUSED)
    deadline, num_hangups = time.monotonic() + KNOCK_S, 0
    try:
        knock.connect(address)
        while num_hangups < NUM_HANGUPS and monitor.poll(max(0.0, deadline - time.monotonic()) * 1000):
            event = parse_monitor_message(monitor.recv_multipart())["event"]
            if event != HUNG_UP:
                return bool(event == REFUSED)
            num_hangups += 1
    finally:
        knock.disable_monitor()
        monitor.close(linger=0)
        knock.close()
        context.term()
    return num_hangups == NUM_HANGUPS


def announce(file: Path, address: str) -> None:
    """Writes an address down where those who ask look for it; they find all of it or nothing."""
    whole = file.with_suffix(".new")
    whole.write_text(address)
    whole.rename(file)
