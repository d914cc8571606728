"""The client's side of act requests over TCP: a seat whose server is on another host.

Imports nothing heavier than numpy and pyzmq.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import zmq

from echelon.errors import ConfigError, Refused, TransportTimeout
from echelon.layout import views_of
from echelon.transport.act_board import ActLayout, Array
from echelon.transport.act_wire import LIFE_BITS, MAX_LIFE, ActWire
from echelon.transport.channel import HEADER
from echelon.transport.channel_client import Client, PendingRequest


class RemoteSeat:
    """A seat whose server is on another host; it has the interface of `Seat`, with its arrays in private memory.

    With `wants_state` a reply carries the recurrent state that it was computed from; without it, the reply is shorter
    and `state_before` returns the state of the last reply that carried one. If the server is gone, `wait` returns False
    and the request is repeated until the server, or its successor at the same address, replies.
    """

    wants_state = True

    def __init__(
        self,
        address: str,
        layout: ActLayout,
        client: int,
        group: int = 0,
        incarnation: int = 0,
        connect_timeout_s: float = 30.0,
    ) -> None:
        """Takes the seat; a successor needs a higher `incarnation` than the process that used it before.

        `wait` raises TransportTimeout if the server sends nothing within `connect_timeout_s` of the first request, and
        Refused if the server refuses.
        """
        if not 0 <= incarnation < MAX_LIFE:
            raise ConfigError(f"incarnation={incarnation} of client {client} is not in 0 to {MAX_LIFE - 1}.")
        self.index = group * layout.num_clients + client
        self._wire = wire = ActWire(layout)
        frame, answer = np.zeros(wire.question_bytes, np.uint8), np.zeros(wire.stateful_bytes, np.uint8)
        frames = (frame.data,)
        self._question, self._reply = lambda: frames, answer.data
        self._reply_sizes = (wire.answer_bytes, wire.stateful_bytes)
        question, reply = views_of(wire.question, frame), views_of(wire.answer, answer)
        self.observation = [question[f"observation.{i}"] for i in range(len(layout.observation))]
        self.first = question["first"]
        self.action, self.log_prob, self.value = reply["action"], reply["log_prob"], reply["value"]
        self._states = [reply[f"state.{i}"] for i in range(len(layout.state_shapes))]
        self.version = 0  # of the weights that computed the last reply
        self._count = (incarnation + 1) << LIFE_BITS
        self._connect_timeout_s, self._connect_by = connect_timeout_s, math.inf
        self.client = Client("the inference server", address, wire.stateful_bytes)
        self.address = self.client.address
        arrival = (bytearray(HEADER.size),)
        self._arrival: PendingRequest | None = self.client.ask(
            wire.seat, lambda: arrival, number=self._count, own=(self.index, 0, 0)
        )
        self._request: PendingRequest | None = None

    def ask(self) -> None:
        """Sends a request; `observation` and `first` must be written, and the previous reply must have been read."""
        self._count += 1
        if self._arrival is not None:  # an act request takes the seat too
            self.client.forget(self._arrival)
            self._arrival = None
        own = (self.index, int(self.wants_state), 0)
        # The arrays do not change until the reply is read.
        self._request = self.client.ask(self._wire.act, self._question, number=self._count, own=own)
        if not self.client.has_heard:
            self._connect_by = min(self._connect_by, time.monotonic() + self._connect_timeout_s)

    @property
    def answered(self) -> bool:
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for the reply; returns whether it has arrived."""
        request = self._request
        if request is None:
            return True
        if not self.client.has_heard:  # no longer than until it is given up
            timeout_s = min(timeout_s, max(0.0, self._connect_by - time.monotonic()))
        try:
            if self.client.wait(request, timeout_s):
                self._take(request)
                return True
        except Refused as error:
            raise Refused(f"seat {self.index}: {error}") from None
        if not self.client.has_heard and time.monotonic() >= self._connect_by:
            raise TransportTimeout(
                f"the inference server at {self.address} did not answer seat {self.index} within "
                f"{self._connect_timeout_s:.1f} s: {self.client.why_silent()}"
            )
        return False

    def _take(self, request: PendingRequest) -> None:
        assert request.answer is not None
        frame = request.answer[0]
        if len(request.answer) != 1 or len(frame) not in self._reply_sizes:
            raise Refused(f"{self.address} sent {len(frame)} bytes, not a reply: it is not an inference server.")
        self._reply[: len(frame)] = frame
        self.version, self._request = request.own[1], None

    def state_before(self) -> list[Array]:
        """Returns the recurrent state that the last reply was computed from."""
        return self._states

    def leave(self) -> None:
        """Leaves the seat: rounds no longer wait for it."""
        self.client.post(self._wire.seat, [bytearray(HEADER.size)], own=(self.index, self._count, 0))
        self.client.close()


def wait_any(seats: Sequence[RemoteSeat], timeout_s: float) -> bool:
    """Waits up to `timeout_s` until one of `seats` has its reply; returns whether one has."""
    if len(seats) == 1:
        return seats[0].wait(timeout_s)
    deadline, poller = time.monotonic() + timeout_s, zmq.Poller()
    for seat in seats:
        poller.register(seat.client.socket, zmq.POLLIN)
    while not any(seat.answered for seat in seats):  # receives replies, and repeats due requests
        now = time.monotonic()
        if now >= deadline:
            return False
        until = min(deadline, *(seat.client.repeat_at for seat in seats))
        poller.poll(max(0, math.ceil((until - now) * 1000)))
    return True
