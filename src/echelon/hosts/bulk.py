"""The agent's bulk connection: trajectories of its actors go up to the carrier, weights and grants come down.

A grant is the learner's permission to write the next trajectories of a stream. Slots go up in the order of each stream,
several in flight, and stay in the ring until the carrier has acknowledged them. Weights come down on a connection of
their own, before the grants that assume them. If the carrier dies, both clients repeat their requests to its successor.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.hosts.messages import NEWER, QUEUED_BYTES, Assignment
from echelon.transport.channel import HEADER, Part
from echelon.transport.channel_client import Client, PendingRequest
from echelon.transport.shared_memory import SlotRing, WeightsBoard
from echelon.transport.slot_wire import SLOTS, SlotBytes

Connect = Callable[[str, str, int, int], Client]  # what, address, bytes of the longest reply, queued messages


class Bulk:
    """This host's ring and board, and the two connections to the carrier that serve them."""

    def __init__(self, session: Path, assignment: Assignment, address: str, connect: Connect) -> None:
        self.address, self._assignment = address, assignment
        self._slots = SlotBytes.from_wire(assignment.slot)
        num = assignment.streams
        self._ring = SlotRing(session, self._slots, num, assignment.slots)
        self._board = WeightsBoard(session, assignment.weights)
        self._most_slots = max(2, QUEUED_BYTES // self._slots.nbytes)  # in flight
        self._up = connect("the run's carrier", address, HEADER.size, self._most_slots)
        self._down = connect("the run's carrier", address, max(assignment.weights, 8 * num), 8)
        self._in_flight: list[deque[PendingRequest]] = [deque() for _ in range(num)]
        self._newer = self._ask_newer()

    @staticmethod
    def size(assignment: Assignment) -> int:
        """Bytes of shared memory that the ring and the board of a host take."""
        slots = SlotBytes.from_wire(assignment.slot)
        return SlotRing.size(slots, assignment.streams, assignment.slots) + WeightsBoard.size(assignment.weights)

    @property
    def watched(self) -> list[Any]:
        """Sockets and descriptors that are readable when there is something to do."""
        return [self._up.socket, self._down.socket, self._ring.ready.descriptor]

    def work(self) -> None:
        """Sends committed slots, and publishes weights and grants that have come."""
        self._up.poll()
        self._down.poll()
        self._take_newer()
        self._send_slots()

    def clear_doorbell(self, ready: Sequence[Any]) -> None:
        """Clears the actors' doorbell if it is among `ready`."""
        if self._ring.ready.descriptor in ready:
            self._ring.ready.clear()

    def why_unreached(self, after_s: float) -> str:
        """Why the carrier has never replied, if it has not for `after_s`; else an empty text."""
        is_unreached = not self._down.has_heard and self._down.silent_s > after_s
        return self._down.why_silent() if is_unreached else ""

    def _ask_newer(self) -> PendingRequest:
        version, granted = self._board.version, self._ring.granted.copy()

        def make() -> list[bytearray]:
            return [bytearray(HEADER.size) + granted.tobytes()]

        return self._down.ask(NEWER, make, own=(version, self._assignment.first, self._assignment.token))

    def _take_newer(self) -> None:
        """Publishes the weights before the grants: an actor with a new grant finds the weights that it assumes."""
        if self._newer.answer is None:
            return
        _, grants, weights = self._newer.answer
        version = self._newer.own[0]
        if len(weights) and version > self._board.version:
            self._board.publish([np.frombuffer(weights, np.uint8)], version)
        for stream, granted in enumerate(np.frombuffer(grants, np.int64).tolist()):
            if granted > self._ring.granted[stream]:
                self._ring.granted[stream] = granted
                self._ring.free[stream].ring()
        self._newer = self._ask_newer()

    def _send_slots(self) -> None:
        ring, left = self._ring, self._most_slots - sum(map(len, self._in_flight))
        for stream, in_flight in enumerate(self._in_flight):
            while in_flight and in_flight[0].answer is not None:
                in_flight.popleft()
                ring.release(stream)
                left += 1
            while left > 0 and len(in_flight) < ring.num_ready(stream):
                left -= 1
                count = int(ring.released[stream]) + len(in_flight)
                parts = self._slots.pack(ring.readable(stream, len(in_flight))["slot"])
                message: list[Part] = [bytearray(HEADER.size), *parts]
                number = count * ring.num_streams + stream + 1
                own = (self._assignment.first + stream, count, self._assignment.token)
                in_flight.append(self._up.ask(SLOTS, functools.partial(_same, message), number=number, own=own))

    def close(self) -> None:
        self._up.close()  # before the ring, whose memory its queue refers to
        self._down.close()
        self._ring.close()


def _same(message: list[Part]) -> list[Part]:
    return message
