"""The settings of TCP sockets on both sides: bounds, heartbeats and reconnection; and the diagnosis of a silent server.

Imports nothing heavier than pyzmq.
"""

from __future__ import annotations

import socket as sockets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from echelon.errors import ConfigError
from echelon.transport.curve import Socket, secure_client
from echelon.transport.secret import REMEDY, numeric

QUEUED_MESSAGES = 8  # default, per connection and direction
HEARTBEAT_MS, SILENCE_MS = 2_000, 10_000  # a connection is closed after SILENCE_MS without a heartbeat
CURVE_BYTES = 64  # more than encryption adds to a frame
HANDSHAKE_BYTES = 1_024  # more than any handshake frame: the limit on the frame size applies to these too
LINGER_MS = 200  # how long the last messages may take to be sent on close
RECONNECT_MS, MAX_RECONNECT_MS = 50, 250
SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"  # the start of every greeting of ZMTP
PROBE_S = 1.0  # how long a listener may take to accept or reject the handshake
NUM_HANGUPS = 3  # in a row: a single one may also come from a peer that is shutting down
MORE = zmq.SNDMORE | zmq.NOBLOCK  # computed once: combining two flags takes longer than using them
HUNG_UP, REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


def make_socket(context: zmq.Context[Socket], kind: int, max_bytes: int, queued: int = QUEUED_MESSAGES) -> Socket:
    """Returns a socket that receives frames of at most `max_bytes` and queues `queued` messages in each direction."""
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
    """Returns a client's socket that connects to `address` in the background, and reconnects while it is open.

    The server recognizes a client by its `name` after a reconnect or a restart of either side; without `name`, libzmq
    assigns one. Only an ipc address has no `secret`.
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
    """Queues a message, or the rest of one; raises zmq.Again if the queue is full."""
    for frame in frames[:-1]:
        socket.send(frame, MORE, copy=copy)
    socket.send(frames[-1], zmq.NOBLOCK, copy=copy)


def receive_frames(socket: Socket, flags: int = 0) -> list[memoryview]:
    """Returns the frames of the next message, or the rest of one, without a copy; raises zmq.Again if there is none."""
    part: Any = socket.recv(flags, copy=False)  # has the `more` flag: querying the socket takes longer
    frames = [memoryview(part)]
    while part.more:
        part = socket.recv(flags, copy=False)
        frames.append(memoryview(part))
    return frames


def why_silent(address: str) -> str:
    """Returns the probable reason why the server at `address` does not reply, and the remedy."""
    try:
        if not _greets(address):
            return (
                "something accepts connections there, but does not reply. If it is a relay (ssh -L, a proxy), the "
                "process behind it is not running: start it. Otherwise check the address."
            )
    except (OSError, ValueError) as error:
        return f"nothing listens there ({error}). Start it, or check the address and the firewall."
    return f"a process listens there, but refuses the handshake or is busy. {REMEDY}"


def _greets(address: str) -> bool:
    """Returns whether the listener at `address` sends the greeting of ZMTP; raises OSError if nothing listens.

    A relay accepts connections whether or not its server runs, and hangs up if not. A server that refuses a handshake
    hangs up as well, but only after its greeting, which does not depend on the secret.
    """
    host, _, port = numeric(address).removeprefix("tcp://").rpartition(":")
    with sockets.create_connection((host, int(port)), timeout=PROBE_S) as connection, suppress(OSError):
        connection.sendall(SIGNATURE)
        return connection.recv(1) == SIGNATURE[:1]
    return False


def is_handshake_refused(address: str, secret: str) -> bool:
    """Returns whether the listener at the tcp `address` refuses the handshake: its secret is another."""
    try:
        if not _greets(address):
            return False
    except (OSError, ValueError):  # nothing listens
        return False
    if not _is_hung_up(address, secret):
        return False
    with suppress(OSError):
        return _greets(address)  # otherwise the server behind a relay has just ended
    return False


def _is_hung_up(address: str, secret: str) -> bool:
    """Returns whether the listener refuses the handshake or hangs up during it."""
    context: zmq.Context[Socket] = zmq.Context()
    probe = make_socket(context, zmq.DEALER, HANDSHAKE_BYTES)
    secure_client(probe, secret)
    monitor: Any = probe.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | HUNG_UP | REFUSED)
    deadline, num_hangups = time.monotonic() + PROBE_S, 0
    try:
        probe.connect(address)
        while num_hangups < NUM_HANGUPS and monitor.poll(max(0.0, deadline - time.monotonic()) * 1000):
            event = parse_monitor_message(monitor.recv_multipart())["event"]
            if event != HUNG_UP:
                return bool(event == REFUSED)
            num_hangups += 1
    finally:
        probe.disable_monitor()
        monitor.close(linger=0)
        probe.close()
        context.term()
    return num_hangups == NUM_HANGUPS


def announce(file: Path, address: str) -> None:
    """Writes `address` to `file` atomically, so that readers find all of it or no file."""
    whole = file.with_suffix(".new")
    whole.write_text(address)
    whole.rename(file)
