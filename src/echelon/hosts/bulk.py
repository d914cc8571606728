"""The agent's bulk connection: trajectories of its actors go up to the carrier, weights and grants come down.

A grant is the learner's permission to write the next trajectories of a stream. Slots go up in the order of each stream,
several in flight, and stay in the ring until the carrier has acknowledged them. Streams have the same numbers on every
host, and continue where the last host ended; this host has those that it has adopted. Weights come down on a connection
of their own, before the grants that assume them. If the carrier dies, both clients repeat their requests to its
successor.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.hosts.messages import NEWER, QUEUED_BYTES, WEIGHTS_FRAME_BYTES, Assignment
from echelon.hosts.run_steps import RunSteps
from echelon.transport.channel import HEADER, Part
from echelon.transport.channel_client import Client, PendingRequest
from echelon.transport.shared_memory import SlotRing, WeightsBoard
from echelon.transport.slot_wire import SLOTS, SlotBytes

SLOWEST_BYTES_PER_S = 5e6  # of a link: weights that take longer are requested again
DRAIN_POLL_S = 0.01


class Bulk:
    """This host's ring and board, and the two connections to the carrier that serve them."""

    def __init__(self, session: Path, assignment: Assignment, address: str, connect: Callable[..., Client]) -> None:
        self.address, self._assignment = address, assignment
        self._slots = SlotBytes.from_wire(assignment.slot)
        self._ring = SlotRing(session, self._slots, assignment.streams, assignment.slots, is_sparse=True)
        self._board, self._steps = WeightsBoard(session, assignment.weights), RunSteps(session)
        self._most_slots = max(2, QUEUED_BYTES // self._slots.nbytes)  # in flight
        self._up = connect("the run's carrier", address, HEADER.size, queued=self._most_slots)
        longest_s = assignment.weights / SLOWEST_BYTES_PER_S
        frame_bytes = max(WEIGHTS_FRAME_BYTES, 16 * assignment.streams)
        self._down = connect("the run's carrier", address, frame_bytes, queued=8, longest_s=longest_s)
        self._in_flight: dict[int, deque[PendingRequest]] = {}  # by stream of this host
        self._tokens: dict[int, int] = {}
        self._newer = self._ask_newer()

    @staticmethod
    def size(assignment: Assignment, num_actors: int) -> int:
        """Bytes of shared memory that a host with so many actors takes: the ring is sparse."""
        slots = SlotBytes.from_wire(assignment.slot)
        return SlotRing.size(slots, num_actors, assignment.slots) + WeightsBoard.size(assignment.weights)

    @property
    def watched(self) -> list[Any]:
        """Sockets and descriptors that are readable when there is something to do."""
        return [self._up.socket, self._down.socket, self._ring.ready.descriptor]

    def adopt(self, stream: int, slot: int, token: int) -> None:
        """Begins to send slots of a stream, from number `slot` on; call it before its actor starts."""
        self.drop(stream)
        self._tokens[stream] = token
        self._ring.reserve(stream)
        self._ring.head[stream] = self._ring.released[stream] = self._ring.granted[stream] = slot
        self._in_flight[stream] = deque()

    def drop(self, stream: int) -> None:
        """Discards the slots of a stream, which another host goes on with."""
        for request in self._in_flight.pop(stream, ()):
            self._up.forget(request)

    def work(self) -> None:
        """Sends committed slots, and publishes weights and grants that have come."""
        self._up.poll()
        self._down.poll()
        self._take_newer()
        self._send_slots()

    def drain(self, timeout_s: float) -> int:
        """Sends the slots of actors that have ended, for up to `timeout_s`; returns how many were not acknowledged."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._up.poll(DRAIN_POLL_S)
            self._send_slots()
            left = sum(map(self._ring.num_ready, self._in_flight))
            if not left or time.monotonic() >= deadline:
                return left

    def clear_doorbell(self, ready: Sequence[Any]) -> None:
        """Clears the actors' doorbell if it is among `ready`."""
        if self._ring.ready.descriptor in ready:
            self._ring.ready.clear()

    def why_unreached(self, after_s: float) -> str:
        """Why the carrier has never replied, if it has not for `after_s`; else an empty text."""
        is_unreached = not self._down.has_heard and self._down.silent_s > after_s
        return self._down.why_silent() if is_unreached else ""

    def _ask_newer(self) -> PendingRequest:
        granted = self._ring.granted
        rows = [(stream, self._tokens[stream], granted[stream]) for stream in self._in_flight]
        known = np.array(rows, np.int64).tobytes()

        def make() -> list[bytearray]:
            return [bytearray(HEADER.size) + known]

        return self._down.ask(NEWER, make, own=(self._board.version, 0, 0))

    def _take_newer(self) -> None:
        """Publishes the weights before the grants: an actor with a new grant finds the weights that it assumes."""
        if self._newer.answer is None:
            return
        _, grants, *weights = self._newer.answer
        version, env_steps, _ = self._newer.own
        self._steps.set(env_steps)
        if weights and version > self._board.version:
            self._board.publish([np.frombuffer(part, np.uint8) for part in weights], version)
        for stream, granted in np.frombuffer(grants, np.int64).reshape(-1, 2).tolist():
            if stream in self._in_flight and granted > self._ring.granted[stream]:
                self._ring.granted[stream] = granted
                self._ring.free[stream].ring()
        self._newer = self._ask_newer()

    def _send_slots(self) -> None:
        ring, left = self._ring, self._most_slots - sum(map(len, self._in_flight.values()))
        for stream, in_flight in self._in_flight.items():
            while in_flight and in_flight[0].answer is not None:
                in_flight.popleft()
                ring.release(stream)
                left += 1
            while left > 0 and len(in_flight) < ring.num_ready(stream):
                left -= 1
                count = int(ring.released[stream]) + len(in_flight)
                parts = self._slots.pack(ring.readable(stream, len(in_flight))["slot"])
                message: list[Part] = [bytearray(HEADER.size), *parts]
                own = (stream, count, self._tokens[stream])
                in_flight.append(self._up.ask(SLOTS, functools.partial(_same, message), own=own))

    def close(self) -> None:
        self._up.close()  # before the ring, whose memory its queue refers to
        self._down.close()
        self._ring.close()


def _same(message: list[Part]) -> list[Part]:
    return message
