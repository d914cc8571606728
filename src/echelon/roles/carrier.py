"""The carrier: brings slots of other hosts into the ring of the learner, and its weights and grants to them.

Waits for: messages of host agents, and grants of the learner for their streams (it sleeps on those doorbells). Wakes:
the learner, by committing a slot. It is the writer of every stream whose actor is on another host. If it dies, the
supervisor starts another, which listens at the same address and goes on where the ring stands: a slot is taken once, as
its number is the ring's own count.
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
from echelon.transport.secret import secret_from_environment
from echelon.transport.slot_wire import SLOTS
from echelon.transport.sockets import announce

BURST = 64  # messages between two looks at everything else


class Carrier:
    """Deals with what has come, a step at a time."""

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
        queued = max(2, QUEUED_BYTES // self.slots.nbytes)  # of each connection
        self.server = Server("hosts", address, secret_from_environment(), most, queued)
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
        """The doorbells of other hosts' streams, by which the learner admits their actors."""
        return {self.ring.free[stream].descriptor: stream for stream in self.ownership.of_others()}

    def _take_slot(self, message: Message) -> None:
        """The next slot of a stream; one that came before is answered again, one that came too early is not."""
        stream, count, token = message.own
        if not 0 <= stream < self.ring.num_streams or not self.ownership.has(stream, token):
            raise Refused("the actors of this host were given to another one")
        head = int(self.ring.head[stream])
        if count > head:
            return
        if count == head:
            if not self.ring.may_begin(stream):
                raise Refused(f"stream {stream} brings more than it was admitted to")
            self.slots.unpack(message.frames[1:], self.ring.writable(stream)["slot"])
            self.ring.commit(stream)
        self.server.answer(message)

    def _answer_newer(self, message: Message) -> None:
        """Weights and grants, as soon as there are newer ones than the host has."""
        version, first, token = message.own
        known = np.frombuffer(message.frames[0][HEADER.size :], np.int64)
        if not 0 <= first < first + len(known) <= self.ring.num_streams or not self.ownership.has(first, token):
            raise Refused("the actors of this host were given to another one")
        granted = self.ring.granted[first : first + len(known)]

        def is_due() -> bool:
            return self.board.version > version or not np.array_equal(granted, known)

        def answer() -> None:
            grants = granted.copy()  # before the weights, which then are no older
            newest, weights = self._newest() if self.board.version > version else (version, b"")
            self.server.answer(message, grants.tobytes(), weights, own=(newest, 0, 0), copy=False)

        if is_due():
            answer()
        else:
            self.server.hold(message, is_due, answer)

    def _newest(self) -> tuple[int, bytes]:
        """The newest weights, copied once for all hosts."""
        if self.board.version > self.packed[0]:
            version = self.board.read(self.weights)
            self.packed = (version, self.weights.tobytes())
        return self.packed

    def close(self) -> None:
        self.server.close()
        self.ring.close()
        self.station.close()


def carrier(config: dict[str, Any]) -> Carrier:
    """The entry of a carrier's process."""
    return Carrier(Context.from_config(config))
