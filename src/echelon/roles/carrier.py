"""The carrier: passes slots from other hosts to the learner, and sends weights and grants to those hosts.

Slots go into the learner's ring, or with replay into the shards of their actors (`SlotSink`). Waits for: messages from
host agents, and on doorbells for grants to their streams, or with replay for samples, after which it may grant. Wakes:
the learner, by committing a slot. The carrier is the only writer of every stream and shard whose actor is on another
host. If it dies, the supervisor starts a new one, which listens at the same address and continues after the last
committed slot. A slot is committed exactly once, because its number must equal `head`, its stream's committed slots.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np

from echelon.errors import DivergedError, Refused
from echelon.hosts.messages import NEWER, QUEUED_BYTES, WEIGHTS_FRAME_BYTES
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
        self.sink, self.board, self.ownership = plan.slot_sink(self.station), plan.board(), plan.ownership()
        self.ring = self.sink.ring
        self.failure: DivergedError | None = None
        self._serve_streams()
        self.weights = np.empty(plan.weights_bytes, np.uint8)
        self.packed: tuple[int, list[bytes]] = (0, [])
        file = plan.carrier_file
        address = file.read_text() if file.exists() else context.train.hosts.bulk_address
        slot_bytes = plan.slot_bytes.nbytes
        most = max(slot_bytes, HEADER.size + 16 * self.ring.num_streams)
        report = functools.partial(self.station.report, "message")
        queued = max(2, QUEUED_BYTES // slot_bytes)  # of each connection
        self.server = Server("hosts", address, most, queued, report)
        self.server.serve(SLOTS, self._take_slot)
        self.seen = (0, self.ring.granted.copy())
        self.server.serve(NEWER, self._answer_newer, self._has_newer)
        announce(file, self.server.address)

    def step(self, timeout_s: float) -> bool:
        if self.station.stop_requested:
            self.finished = True
            return False
        start = time.perf_counter()
        if not self.ownership.is_seen:
            self.ownership.look()
            self._serve_streams()
        self.sink.grant()
        worked = self.server.take(BURST)
        if self.failure is not None:
            raise self.failure
        now = time.perf_counter()
        self.station.phases["transfer"] += now - start
        if not worked:
            for descriptor in self.server.sleep(min(timeout_s, self.sink.patience_s), list(self.bells)):
                self.bells[descriptor].clear()
            self.station.waited(now)
            return False
        self.station.progress += 1
        self.station.tick(now)
        return True

    def _serve_streams(self) -> None:
        self.sink.serve(self.ownership.of_others())
        self.bells = {bell.descriptor: bell for bell in self.sink.bells}

    def _take_slot(self, message: Message) -> None:
        """Commits the next slot of a stream; discards it if the stream was given to another host.

        A slot that is already committed is only acknowledged again; a slot that arrives before its predecessor is
        ignored and gets no reply. A slot with NaN or infinity ends the run.
        """
        stream, count, token = message.own
        if not 0 <= stream < self.ring.num_streams:
            raise Refused(f"a slot was refused: there is no stream {stream}")
        if not self.ownership.has(stream, token):
            self.server.answer(message)
            return
        head = int(self.ring.head[stream])
        if count > head:
            return
        if count == head:
            if not self.ring.may_begin(stream):
                raise Refused(f"stream {stream} sent slot {count}, which was not granted")
            try:
                self.sink.write(stream, message.frames[1:])
            except DivergedError as error:
                self.failure = error
                return
            self.ring.commit(stream)
        self.server.answer(message)

    def _answer_newer(self, message: Message) -> None:
        """Replies with weights and grants as soon as they are newer than those of the host."""
        version = message.own[0]
        known = np.frombuffer(message.frames[0][HEADER.size :], np.int64).reshape(-1, 3)
        if known.size and not 0 <= known[:, 0].min() <= known[:, 0].max() < self.ring.num_streams:
            raise Refused("a request for grants was refused: there is no such stream")
        streams, _, grants = known[[self.ownership.has(stream, token) for stream, token, _ in known.tolist()]].T

        def is_due() -> bool:
            return self.board.version > version or not np.array_equal(self.ring.granted[streams], grants)

        def answer() -> None:
            newer = np.stack([streams, self.ring.granted[streams]], 1)  # before the weights, which are at least as new
            newest, weights = self._newest() if self.board.version > version else (version, [])
            own = (newest, self.sink.env_steps, 0)
            self.server.answer(message, newer.tobytes(), *weights, own=own, copy=False)

        if is_due():
            answer()
        else:
            self.server.hold(message, is_due, answer)

    def _has_newer(self) -> bool:
        """Returns whether there are weights or grants that this method has not seen yet."""
        before, self.seen = self.seen, (self.board.version, self.ring.granted.copy())
        return before[0] != self.seen[0] or not np.array_equal(before[1], self.seen[1])

    def _newest(self) -> tuple[int, list[bytes]]:
        """Returns the newest version and the frames of its weights, copied once for all hosts."""
        if self.board.version > self.packed[0]:
            version, size = self.board.read(self.weights), WEIGHTS_FRAME_BYTES
            frames = [self.weights[start : start + size].tobytes() for start in range(0, len(self.weights), size)]
            self.packed = (version, frames)
        return self.packed

    def close(self) -> None:
        self.server.close()
        self.ring.close()
        self.station.close()


def carrier(config: dict[str, Any]) -> Carrier:
    """The entry point of a carrier process."""
    return Carrier(Context.from_config(config))
