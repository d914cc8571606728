"""The carrier: copies slots from other hosts into the learner's ring, and sends weights and grants to those hosts.

Waits for: messages from host agents, and grants from the learner for their streams (it sleeps on those doorbells).
Wakes: the learner, by committing a slot. The carrier is the only writer of every stream whose actor is on another
host. If it dies, the supervisor starts a new one, which listens at the same address and continues after the last
committed slot. A slot is committed exactly once, because its number must equal `head`, its stream's committed slots.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np

from echelon.errors import Refused
from echelon.hosts.messages import NEWER, QUEUED_BYTES
from echelon.roles.context import Context, Station
from echelon.roles.plan.parts import Plan
from echelon.transport.channel import HEADER, Message
from echelon.transport.channel_server import Server
from echelon.transport.slot_wire import SLOTS
from echelon.transport.sockets import announce

BURST = 64  # most messages handled in one step


class Carrier:
    """The carrier role: handles up to BURST messages per step."""

    def __init__(self, context: Context) -> None:
        self.station, self.finished = Station(context), False
        plan = Plan(context)
        self.slots, self.ring, self.board = plan.slot_bytes, plan.raw_ring(), plan.board()
        self.ownership = plan.ownership()
        self._bells = functools.cache(self._find_bells)
        self.weights, self.packed = np.empty(plan.weights_bytes, np.uint8), (0, b"")
        file = plan.carrier_file
        address = file.read_text() if file.exists() else context.train.hosts.bulk_address
        most = max(self.slots.nbytes, HEADER.size + 8 * self.ring.num_streams)
        report = functools.partial(self.station.report, "message")
        queued = max(2, QUEUED_BYTES // self.slots.nbytes)  # of each connection
        self.server = Server("hosts", address, most, queued, report)
        self.server.serve(SLOTS, self._take_slot)
        self.server.serve(NEWER, self._answer_newer)
        announce(file, self.server.address)

    def step(self, timeout_s: float) -> bool:
        if self.station.stop_requested:
            self.finished = True
            return False
        start = time.perf_counter()
        if not self.ownership.is_seen:
            self.ownership.look()
            self._bells.cache_clear()
        worked = self.server.take(BURST)
        now = time.perf_counter()
        self.station.phases["transfer"] += now - start
        if not worked:
            bells = self._bells()
            for descriptor in self.server.sleep(timeout_s, list(bells)):
                self.ring.free[bells[descriptor]].clear()
            self.station.waited(now)
            return False
        self.station.progress += 1
        self.station.tick(now)
        return True

    def _find_bells(self) -> dict[int, int]:
        """Maps the descriptors of the `free` doorbells of other hosts' streams to the streams.

        The learner rings them when it grants those actors slots.
        """
        return {self.ring.free[stream].descriptor: stream for stream in self.ownership.of_others()}

    def _take_slot(self, message: Message) -> None:
        """Commits the next slot of a stream.

        A slot that is already committed is only acknowledged again; a slot that arrives before its predecessor is
        ignored and gets no reply.
        """
        stream, count, token = message.own
        if not 0 <= stream < self.ring.num_streams or not self.ownership.has(stream, token):
            raise Refused("the actors of this host were reassigned to another host")
        head = int(self.ring.head[stream])
        if count > head:
            return
        if count == head:
            if not self.ring.may_begin(stream):
                raise Refused(f"stream {stream} sent slot {count}, which was not granted")
            self.slots.unpack(message.frames[1:], self.ring.writable(stream)["slot"])
            self.ring.commit(stream)
        self.server.answer(message)

    def _answer_newer(self, message: Message) -> None:
        """Replies with weights and grants as soon as they are newer than those of the host."""
        version, first, token = message.own
        known = np.frombuffer(message.frames[0][HEADER.size :], np.int64)
        if not 0 <= first < first + len(known) <= self.ring.num_streams or not self.ownership.has(first, token):
            raise Refused("the actors of this host were reassigned to another host")
        granted = self.ring.granted[first : first + len(known)]

        def is_due() -> bool:
            return self.board.version > version or not np.array_equal(granted, known)

        def answer() -> None:
            grants = granted.copy()  # copied before the weights, so that the weights are at least as new
            newest, weights = self._newest() if self.board.version > version else (version, b"")
            self.server.answer(message, grants.tobytes(), weights, own=(newest, 0, 0), copy=False)

        if is_due():
            answer()
        else:
            self.server.hold(message, is_due, answer)

    def _newest(self) -> tuple[int, bytes]:
        """Returns the newest version and its weights, copied once for all hosts."""
        if self.board.version > self.packed[0]:
            version = self.board.read(self.weights)
            self.packed = (version, self.weights.tobytes())
        return self.packed

    def close(self) -> None:
        self.server.close()
        self.ring.close()
        self.station.close()


def carrier(config: dict[str, Any]) -> Carrier:
    """The entry point of a carrier process."""
    return Carrier(Context.from_config(config))
