"""Central acting: requests go to an inference server, over shared memory or TCP, and its replies arrive later.

Shapes: K environments of a group.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.roles.acting import ActReply, ActRequest, Exploring
from echelon.transport.act_board import ActBoard, ActLayout, Seat
from echelon.transport.futex import NUM_MASKS
from echelon.transport.remote_seat import RemoteSeat, wait_any

Array = np.ndarray[Any, Any]
ADDRESS_POLL_S = 0.02


class Seated(ABC):
    """The common part of central acting over shared memory and over TCP: one seat for each group.

    A request all of whose rows take random actions is not sent, unless the policy has a state that it advances.
    """

    def __init__(self, layout: ActLayout, client: int, incarnation: int, exploring: Exploring | None) -> None:
        self.layout, self.client, self.incarnation, self.exploring = layout, client, incarnation, exploring
        self._seats: list[Seat | RemoteSeat | None] = [None] * layout.num_groups
        self._random: dict[int, ActReply] = {}  # replies to requests that were not sent
        self._asking: dict[int, None] = {}  # groups with an outstanding request, the oldest first
        self._requests: dict[int, ActRequest] = {}

    @abstractmethod
    def begin(self, group: int) -> bool: ...

    @abstractmethod
    def wait(self, timeout_s: float) -> None: ...

    def submit(self, group: int, request: ActRequest) -> None:
        seat = self._seat(group)
        if self.exploring is not None:
            reply = self.exploring.begin(group, request, seat.version)
            if reply is not None and not self.layout.state_shapes:
                self._random[group] = reply
                return
        for target, source in zip(seat.observation, request.leaves, strict=True):
            target[...] = source
        seat.first[...] = request.first
        self._asking[group] = None
        self._requests[group] = request
        seat.ask()

    def collect(self, group: int) -> ActReply | None:
        if (random := self._random.pop(group, None)) is not None:
            return random
        seat = self._seat(group)
        if not seat.answered:
            return None
        self._asking.pop(group, None)
        reply = ActReply(seat.action, seat.log_prob, seat.version)
        return reply if self.exploring is None else self.exploring.change(group, self._requests[group], reply)

    def state_before(self, group: int) -> Sequence[Array]:
        return self._seat(group).state_before()

    @property
    def asking(self) -> bool:
        return bool(self._asking)

    def close(self) -> None:
        for seat in self._seats:
            if seat is not None:
                seat.leave()

    def _seat(self, group: int) -> Seat | RemoteSeat:
        seat = self._seats[group]
        assert seat is not None, f"group {group} of actor {self.client} submitted a request before it began"
        return seat


class CentralActing(Seated):
    """Requests actions from the inference server over shared memory; needs no model.

    A seat is taken only after the last request of its previous owner was answered. The server therefore never mistakes
    a request of a dead actor for one of its successor, and resets the recurrent state of the seat. If the server dies,
    requests stay on the board for its successor.
    """

    def __init__(self, board: ActBoard, client: int, incarnation: int, exploring: Exploring | None = None) -> None:
        super().__init__(board.layout, client, incarnation, exploring)
        self.board = board
        self._round = board.rounds[board.layout.server_of(client)]

    def begin(self, group: int) -> bool:
        if self._seats[group] is not None:
            return True
        if not self._is_answered(group):
            self._asking[group] = None  # wait for the last request of the previous incarnation
            return False
        self._asking.pop(group, None)
        self._seats[group] = Seat(self.board, self.client, group, self.incarnation)
        return True

    def wait(self, timeout_s: float) -> None:
        deadline, mask = time.monotonic() + timeout_s, 0
        for group in self._asking:
            mask |= 1 << self._index(group) % NUM_MASKS
        while True:
            seen = self._round.value
            left_s = deadline - time.monotonic()
            if left_s <= 0.0 or any(self._is_answered(group) for group in self._asking):
                return
            self._round.wait(seen, left_s, mask)

    def _index(self, group: int) -> int:
        return group * self.board.layout.num_clients + self.client

    def _is_answered(self, group: int) -> bool:
        index = self._index(group)
        return bool(self.board.asked[index] == self.board.answered[index])


class RemoteActing(Seated):
    """Requests actions from the inference server over TCP; needs no model and no shared memory with the server.

    The server writes its address to `address_file`. If it dies, its successor listens at the same address and requests
    are sent again.
    """

    def __init__(
        self,
        layout: ActLayout,
        address_file: Path,
        client: int,
        incarnation: int,
        exploring: Exploring | None = None,
    ) -> None:
        super().__init__(layout, client, incarnation, exploring)
        self.address_file = address_file
        self._remote: dict[int, RemoteSeat] = {}  # by group

    def begin(self, group: int) -> bool:
        if self._seats[group] is None:
            if not self.address_file.exists():
                return False
            address = self.address_file.read_text()
            seat = RemoteSeat(address, self.layout, self.client, group, self.incarnation)
            self._seats[group] = self._remote[group] = seat
        self._seat(group).wants_state = True  # only the first step of a trajectory needs the state in the reply
        return True

    def collect(self, group: int) -> ActReply | None:
        reply = super().collect(group)
        if reply is not None:
            self._seat(group).wants_state = False
        return reply

    @property
    def asking(self) -> bool:
        return bool(self._asking) or None in self._seats

    def wait(self, timeout_s: float) -> None:
        if self._asking:
            wait_any([self._remote[group] for group in self._asking], timeout_s)
        else:
            time.sleep(min(timeout_s, ADDRESS_POLL_S))  # the server is still starting
