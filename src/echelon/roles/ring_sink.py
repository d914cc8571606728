"""Where the carrier puts the slots of other hosts: the learner's ring, or with replay the shards (`shard_sink`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from echelon.transport.shared_memory import Doorbell, SlotRing
from echelon.transport.slot_wire import SlotBytes


class SlotSink(Protocol):
    """Receives the slots of other hosts, each exactly once and in the order of its stream."""

    @property
    def ring(self) -> SlotRing:
        """The words that count slots and grants."""

    @property
    def env_steps(self) -> int:
        """The environment steps of the run so far, for the exploration of actors; 0 if they do not need it."""

    @property
    def bells(self) -> Sequence[Doorbell]:
        """Doorbells that ring when streams may be granted more slots."""

    @property
    def patience_s(self) -> float:
        """How long the carrier may sleep before it calls `grant` again."""

    def serve(self, streams: Sequence[int]) -> None:
        """Prepares for slots of `streams`, and of no others from now on."""

    def grant(self) -> None:
        """Grants the streams the slots that are due, unless another role does that."""

    def write(self, stream: int, parts: Sequence[memoryview]) -> None:
        """Stores the next slot of a stream; the carrier counts it afterwards. Raises Refused if it is malformed."""


class RingSink:
    """Copies slots into the learner's ring. The learner grants, and rings the `free` doorbells of the streams."""

    patience_s = 1.0
    env_steps = 0

    def __init__(self, ring: SlotRing, slots: SlotBytes) -> None:
        self.ring, self._slots = ring, slots
        self.bells: list[Doorbell] = []

    def serve(self, streams: Sequence[int]) -> None:
        self.bells = [self.ring.free[stream] for stream in streams]

    def grant(self) -> None:
        """Does nothing: the learner grants."""

    def write(self, stream: int, parts: Sequence[memoryview]) -> None:
        self._slots.unpack(parts, self.ring.writable(stream)["slot"])
