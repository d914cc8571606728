"""The sockets of one member: they send and receive raw frames, which `messages` interprets."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq

from echelon.errors import ConfigError
from echelon.transport.codec import Buffer
from echelon.transport.curve import Socket, secure_client, secure_server
from echelon.transport.secret import secret_for
from echelon.transport.session import is_taken
from echelon.transport.sockets import LINGER_MS, make_socket
from echelon.world.address import check_address, ipc_path, remove

if TYPE_CHECKING:
    from echelon.transport.channel_ends import SocketEnd

QUEUED_MESSAGES = 20_000  # per peer and direction
MAX_SOCKETS = 16_384  # one for each peer
LONGEST_S = 3600.0  # of one wait: libzmq counts milliseconds in 32 bits
BURST = 1000  # messages read from one socket before the next socket is read
IGNORED_CONNECTIONS = 10_000  # the oldest are evicted


@dataclass(frozen=True, slots=True)
class Arrival:
    """A received message: a request on a `connection` of our router, or a reply from the peer at `address`."""

    frames: list[bytes]
    connection: bytes = b""
    address: str = ""


class Endpoint:
    """One ROUTER, which receives requests and sends replies, and one DEALER, a link, to each peer.

    Each queue holds `QUEUED_MESSAGES`. A full queue never blocks: `send` returns False, a reply is lost. Dropping a
    link also drops its queue. Sockets do not survive a fork, so a forked copy of an endpoint raises ConfigError.
    """

    def __init__(self, address: str, max_frame_bytes: int) -> None:
        """Binds the router at `address` (tcp with port 0: any free port; an ipc file of a dead process is replaced).

        Over tcp, both sides prove that they know the secret.
        """
        check_address(address)
        self._secret = secret_for(address) if address.startswith("tcp://") else None
        self.shared = address.startswith("inproc://")  # inproc peers must share one context
        self.max_frame_bytes = max_frame_bytes
        self.closed = False
        self.pid = os.getpid()
        self._context: zmq.Context[Socket] = zmq.Context.instance() if self.shared else zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._router = make_socket(self._context, zmq.ROUTER, max_frame_bytes, QUEUED_MESSAGES)
        self._links: dict[str, Socket] = {}
        self._ends: weakref.WeakSet[SocketEnd] = weakref.WeakSet()
        self._opening = threading.Lock()  # held while an end is created, and while all are closed
        self._ignored: dict[bytes, None] = {}
        self._gate = secure_server(self._router, self._secret) if self._secret is not None else None
        self.watched: list[tuple[Any, int]] = []  # what to poll for messages
        self._watch()
        try:
            self.address = _bind(self._router, address)
        except ConfigError:
            self._shut(0)
            raise

    @property
    def num_turned_away(self) -> int:
        """Number of connections to the router that had another secret, or none."""
        return self._gate.num_refused if self._gate else 0

    def send(self, address: str, frames: list[Buffer]) -> bool:
        """Queues a copy of `frames` for the peer at `address`; False when its queue is full."""
        self._check_usable()
        link = self._links.get(address)
        if link is None:
            link = make_socket(self._context, zmq.DEALER, self.max_frame_bytes, QUEUED_MESSAGES)
            if self._secret is not None:
                secure_client(link, self._secret)
            link.connect(address)
            self._links[address] = link
            self._watch()
        try:
            link.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def answer(self, connection: bytes, frames: list[Buffer]) -> None:
        """Sends `frames` to the sender of a request; they are dropped silently if the sender has left."""
        if not self.closed:
            self._router.send_multipart([connection, *frames], zmq.NOBLOCK)

    def open_end(self, make: Callable[..., SocketEnd], address: str, name: str) -> SocketEnd:
        """Creates the end of a channel of the client `name` by `SocketEnd.listen` or `.connect`; from any thread.

        The end uses the secret of this endpoint and is closed with it.
        """
        check_address(address)
        with self._opening:
            self._check_usable()
            end = make(self._context, address, self._secret, self.max_frame_bytes, name)
            self._ends.add(end)
        return end

    def arrivals(self, timeout_s: float, fds: Sequence[int] = ()) -> Iterator[Arrival]:
        """Yields the received messages, after waiting up to `timeout_s` for one or for one of `fds` to be readable.

        The code that handles one arrival may send, drop links, close, or iterate over arrivals itself.
        """
        self._check_usable()
        addresses = {link: address for address, link in self._links.items()}
        watched = [*self.watched, *((fd, zmq.POLLIN) for fd in fds)]
        for item, _ in zmq.zmq_poll(watched, math.ceil(min(timeout_s, LONGEST_S) * 1000)):
            if self._gate and item in self._gate.descriptors:
                self._gate.serve()
            if item is not self._router and item not in addresses:
                continue
            for _ in range(BURST):
                if item.closed:
                    break
                try:
                    frames = item.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if item is not self._router:
                    yield Arrival(frames, address=addresses[item])
                elif frames[0] not in self._ignored:
                    yield Arrival(frames[1:], connection=frames[0])

    def _watch(self) -> None:
        gate = self._gate.descriptors if self._gate else []
        self.watched[:] = [(item, zmq.POLLIN) for item in (self._router, *self._links.values(), *gate)]

    def ignore(self, connection: bytes) -> None:
        """Drops all further messages from a connection that sent an invalid one."""
        self._ignored[connection] = None
        if len(self._ignored) > IGNORED_CONNECTIONS:
            del self._ignored[next(iter(self._ignored))]

    def drop(self, address: str) -> None:
        """Closes the link to a peer and drops the messages queued for it."""
        if link := self._links.pop(address, None):
            link.close(linger=0)
            self._watch()

    def close(self) -> None:
        """Closes all sockets after waiting up to LINGER_MS for the last messages; does nothing in a forked copy."""
        if not self.closed and os.getpid() == self.pid:
            if self.shared:
                self._router.unbind(self.address)  # now: a context that stays open frees the name only some time later
            self._shut(LINGER_MS)
            remove(self.address)

    def _shut(self, linger_ms: int) -> None:
        self.closed = True
        if self._gate:
            self._gate.close()
        with self._opening:
            for end in list(self._ends):
                end.close()
        for socket in (self._router, *self._links.values()):
            socket.close(linger=linger_ms)
        if not self.shared:
            self._context.term()  # returns when everything is sent or the linger time is over

    def _check_usable(self) -> None:
        if os.getpid() != self.pid:
            raise ConfigError(
                f"the endpoint {self.address} was created in process {self.pid} and used in its fork {os.getpid()}. "
                "Join the world in the process that uses it."
            )
        if self.closed:
            raise ConfigError(f"the endpoint {self.address} was used after it was closed.")


def _bind(router: Socket, address: str) -> str:
    """Binds the router; returns its address, with the port that was chosen."""
    if path := ipc_path(address):
        if is_taken(path):
            raise ConfigError(f"another process already listens at {address}. End that run, or use another folder.")
        path.unlink(missing_ok=True)
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen at {address}: {error}. Choose another address, or port 0.") from error
    return router.getsockopt_string(zmq.LAST_ENDPOINT) if address.startswith("tcp://") else address
