"""The sockets of one member: raw frames in, raw frames out; what they mean is the world's business."""

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
from echelon.transport.session import is_taken
from echelon.transport.sockets import LINGER_MS, make_socket
from echelon.world.address import check_address, ipc_path, remove

if TYPE_CHECKING:
    from echelon.transport.channel_ends import SocketEnd

QUEUED_MESSAGES = 20_000  # per peer and direction
MAX_SOCKETS = 16_384  # one for each peer
LONGEST_S = 3600.0  # one wait; libzmq counts milliseconds in 32 bits
BURST = 1000  # messages taken from one socket before the others get their turn
IGNORED_CONNECTIONS = 10_000  # the oldest are forgotten


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message that came in: a request on the `connection` of our router, or an answer from the peer at `address`."""

    frames: list[bytes]
    connection: bytes = b""
    address: str = ""


class Endpoint:
    """One ROUTER, where requests come in and answers go out, and one DEALER, a link, to each peer.

    Each queue holds `QUEUED_MESSAGES`; nobody blocks on a full one: `send` says False, an answer is lost. A link that
    is dropped takes its queue with it. Sockets survive no fork, so a forked copy of an endpoint refuses to work.
    """

    def __init__(self, address: str, max_frame_bytes: int, secret: str | None = None) -> None:
        """Binds the router at `address` (tcp with port 0: any free one; a dead ipc file is replaced).

        Over tcp both sides prove that they know the `secret`, if there is one.
        """
        check_address(address, secret)
        self._secret = secret if address.startswith("tcp://") else None
        self.shared = address.startswith("inproc://")  # such peers must have one context
        self.max_frame_bytes = max_frame_bytes
        self.closed = False
        self.pid = os.getpid()
        self._context: zmq.Context[Socket] = zmq.Context.instance() if self.shared else zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._router = make_socket(self._context, zmq.ROUTER, max_frame_bytes, QUEUED_MESSAGES)
        self._links: dict[str, Socket] = {}
        self._ends: weakref.WeakSet[SocketEnd] = weakref.WeakSet()
        self._opening = threading.Lock()  # held while there is a new end, or all are closed
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
        """Connections to the router that had another secret, or none."""
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
        """Sends `frames` back to where a request came from; lost without a word if the asker is gone."""
        if not self.closed:
            self._router.send_multipart([connection, *frames], zmq.NOBLOCK)

    def open_end(self, make: Callable[..., SocketEnd], address: str, name: str) -> SocketEnd:
        """An end of calls of the client `name`, as `SocketEnd.listen` or `.connect` makes it; from any thread.

        It is closed with this endpoint, whose secret and gate it has.
        """
        check_address(address, self._secret)
        with self._opening:
            self._check_usable()
            end = make(self._context, address, self._secret, self.max_frame_bytes, name)
            self._ends.add(end)
        return end

    def arrivals(self, timeout_s: float, fds: Sequence[int] = ()) -> Iterator[Arrival]:
        """What has come in, after waiting up to `timeout_s` for it or for one of `fds` to be readable.

        Whoever handles one arrival may send, drop links, close, or take arrivals itself.
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
        """Takes nothing more from a connection that broke the rules."""
        self._ignored[connection] = None
        if len(self._ignored) > IGNORED_CONNECTIONS:
            del self._ignored[next(iter(self._ignored))]

    def drop(self, address: str) -> None:
        """Closes the link to a peer and forgets what was queued for it."""
        if link := self._links.pop(address, None):
            link.close(linger=0)
            self._watch()

    def close(self) -> None:
        """Closes everything, waiting a little for what was sent last; a forked copy does nothing."""
        if not self.closed and os.getpid() == self.pid:
            if self.shared:
                self._router.unbind(self.address)  # at once: a context that lives on frees the name some time later
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
            self._context.term()  # returns when everything is sent or has lingered long enough

    def _check_usable(self) -> None:
        if os.getpid() != self.pid:
            raise ConfigError(
                f"the endpoint {self.address} was made in process {self.pid} and used in its fork {os.getpid()}. "
                "Join the world in the process that uses it."
            )
        if self.closed:
            raise ConfigError(f"the endpoint {self.address} was used after it was closed.")


def _bind(router: Socket, address: str) -> str:
    """Binds and says where."""
    if path := ipc_path(address):
        if is_taken(path):
            raise ConfigError(f"somebody already listens at {address}. End that run, or use another folder.")
        path.unlink(missing_ok=True)
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen at {address}: {error}. Choose another address, or port 0.") from error
    if path:
        path.chmod(0o600)
    return router.getsockopt_string(zmq.LAST_ENDPOINT) if address.startswith("tcp://") else address
