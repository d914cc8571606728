"""The connections of a listening socket: counts failed handshakes, and bounds the unread bytes of each connection.

libzmq bounds the size of a frame and the number of finished messages that are queued, but not the number of frames in a
message, and the owner sees a message only when it is finished. So the bytes that TCP received on a connection since the
owner last read a message of it are bounded here; a connection beyond the bound is closed. An honest peer never reaches
it: libzmq stops reading when its queue is full, and messages within their size limit fit into the bound.

Imports nothing heavier than pyzmq.
"""

from __future__ import annotations

import fcntl
import os
import socket as sockets
import struct
import termios
import time
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

LOOK_S = 0.05  # how often the unread bytes are looked at; what arrives within this time is the error of the bound
MOST_BUSY = 0.01  # of the owner's time for that: with thousands of connections they are looked at less often
LEEWAY_BYTES = 16 << 20  # for headers, heartbeats (some 40 bytes per second) and encryption
BYTES_RECEIVED = struct.Struct("<128xQ")  # tcpi_bytes_received in the kernel's struct tcp_info
RESET = struct.pack("ii", 1, 0)  # closing sends a reset: the peer must not wait for room in a buffer
FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # another secret, or none; not a peer that only hangs up, as a probe does
OPENED, CLOSED = zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class _Connection:
    """A connection: `peer` tells it apart from a later one with the same descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        with self._borrowed() as tcp:
            self.peer = tcp.getpeername()
        self.read_at = 0  # bytes received when the owner was last seen to have read a message

    def received(self) -> int:
        """Returns the number of bytes that TCP has received."""
        with self._borrowed() as tcp:
            data = tcp.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, BYTES_RECEIVED.size)
        count: int = BYTES_RECEIVED.unpack(data)[0]
        return count

    def close_if_beyond(self, most: int) -> bool:
        """Closes the connection if libzmq has taken more than `most` unread bytes from it; returns whether it did."""
        with self._borrowed() as tcp:
            in_kernel = struct.unpack("i", fcntl.ioctl(tcp, termios.FIONREAD, bytes(4)))[0]
            if tcp.getpeername() != self.peer or self.received() - in_kernel - self.read_at <= most:
                return False
            tcp.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, RESET)
            tcp.shutdown(sockets.SHUT_RDWR)  # libzmq then closes its descriptor and drops the unfinished message
            return True

    def _borrowed(self) -> sockets.socket:
        """Returns a duplicate, which remains this connection if libzmq closes its descriptor meanwhile."""
        return sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM, 0, os.dup(self.descriptor))


class Connections:
    """Watches the connections of a listening socket; without `most_unread`, only counts failed handshakes."""

    def __init__(self, socket: zmq.Socket[bytes], most_unread: int | None = None) -> None:
        self.num_failed = 0  # handshakes that failed before the gate was asked
        self.heard: set[int] = set()  # descriptors whose messages were read; the owner adds them
        self._most = None if most_unread is None else most_unread + LEEWAY_BYTES
        self._socket, self._open, self._look_at = socket, dict[int, _Connection](), 0.0
        self._monitor: Any = socket.get_monitor_socket(FAILED if most_unread is None else FAILED | OPENED | CLOSED)
        self.descriptor = int(self._monitor.getsockopt(zmq.FD))

    def serve(self) -> list[str]:
        """Reads all events, because `descriptor` is edge-triggered; returns why connections were closed, if any."""
        with suppress(zmq.Again):
            while True:
                self._take(parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK)))
        if self._most is None or (start := time.monotonic()) < self._look_at:
            return []
        reasons = [reason for connection in self._open.values() if (reason := self._look(connection))]
        self.heard.clear()
        now = time.monotonic()
        self._look_at = now + max(LOOK_S, (now - start) / MOST_BUSY)
        return reasons

    def _take(self, event: Any) -> None:
        kind, descriptor = event["event"], int(event["value"])
        if kind & FAILED:
            self.num_failed += 1
        elif kind & CLOSED:
            self._open.pop(descriptor, None)
        else:
            with suppress(OSError):  # it has closed already
                self._open[descriptor] = _Connection(descriptor)

    def _look(self, connection: _Connection) -> str:
        assert self._most is not None
        with suppress(OSError):  # it has closed already, and its event follows
            received = connection.received()
            if connection.descriptor in self.heard:
                connection.read_at = received
            elif received - connection.read_at > self._most and connection.close_if_beyond(self._most):
                return (
                    f"it sent {(received - connection.read_at) >> 20:,} MB without the end of a message, "
                    f"{self._most >> 20:,} MB are allowed"
                )
        return ""

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
