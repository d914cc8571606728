"""The stub roles of scale.py: they move slots and weights as actors and a learner do, and compute nothing.

A stub actor fills every slot that it is granted, immediately. The stub learner checks, releases and grants slots a
batch at a time, as the learner of `impala` does, and publishes weights, at the rates that scale.py writes into `Panel`.
Imports neither torch nor an environment, so that a thousand of them fit into one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from echelon.hosts.ownership import Ownership
from echelon.roles.gauge import PHASES, Gauge
from echelon.transport.segments import join_segment
from echelon.transport.shared_memory import SlotRing, WeightsBoard
from echelon.transport.slot_wire import SlotBytes
from echelon.world.node import Node

Array = np.ndarray[Any, Any]
TICK_S = 0.25
SLEEP_S = 0.5  # a stub actor without a grant; longer than that of an actor, as a thousand share two cores
STAMP_BYTES = 24  # at the begin of a slot: its stream, its number, and a word that depends on both
UNLIMITED = -1.0


class Panel:
    """What scale.py asks of the stub learner, and what that has counted: words in the head's shared memory."""

    ASKED = ("slots_per_s", "versions_per_s", "is_over")
    COUNTED = ("slots", "wrong", "versions")

    def __init__(self, session: Path) -> None:
        self._words = join_segment(session / "panel", 8 * len(self.ASKED + self.COUNTED)).view(np.float64)

    def __getitem__(self, name: str) -> float:
        return float(self._words[(self.ASKED + self.COUNTED).index(name)])

    def __setitem__(self, name: str, value: float) -> None:
        self._words[(self.ASKED + self.COUNTED).index(name)] = value


class Stub:
    """A role that joins its coordinator or agent and shows its progress, as every role does."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.finished, self._progress, self._tick_at = False, 0, 0.0
        self._session, sizes = Path(config["session"]), config["sizes"]
        self._world = Node.join(config["address"], config["name"], on_silence=lambda error: 10.0)
        self._world.serve("stop", self._stop)
        self._gauge = Gauge(self._session, config["name"])
        self._gauge.begin(config["incarnation"])
        slots = SlotBytes.from_wire(sizes["slot"])
        self._ring = SlotRing(self._session, slots, sizes["streams"], sizes["slots"])
        self._filled = filled(slots)

    def _stop(self) -> None:
        self.finished = True

    def _tick(self) -> None:
        self._progress += 1
        if (now := time.monotonic()) >= self._tick_at:
            self._tick_at = now + TICK_S
            self._gauge.show(self._progress, dict.fromkeys(PHASES, 0.0))
            self._world.poll(0.0)

    def close(self) -> None:
        self._ring.close()
        self._world.close()


class StubActor(Stub):
    """Fills the slots of one stream. Those of the head get no grants."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._stream: int = config["index"]
        if not config["is_at_head"]:
            for slot in self._ring.slots(self._stream):
                slot["slot"][:] = self._filled

    def step(self, timeout_s: float) -> bool:
        del timeout_s
        bell = self._ring.free[self._stream]
        bell.clear()
        while self._ring.may_begin(self._stream):
            stamp(self._ring.writable(self._stream)["slot"], self._stream, int(self._ring.head[self._stream]))
            self._ring.commit(self._stream)
        bell.wait(SLEEP_S)
        self._tick()
        return True


class StubLearner(Stub):
    """Takes the slots of other hosts and publishes weights; checks that each slot comes once, in order and whole."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        sizes = config["sizes"]
        self._panel, self._board = Panel(self._session), WeightsBoard(self._session, sizes["weights"])
        self._weights = np.zeros(sizes["weights"], np.uint8)
        self._streams = np.array(Ownership(self._session, sizes["streams"]).of_others())
        self._batch: list[int] = []  # streams whose slots were read since the last grants
        self._grant_at = self._publish_at = 0.0
        self._slots = self._wrong = 0
        self._publish()

    def step(self, timeout_s: float) -> bool:
        now, panel, ring = time.monotonic(), self._panel, self._ring
        if panel["is_over"]:
            return self._end()
        if panel["slots_per_s"] and not ring.granted[self._streams].any():
            self._batch = self._streams.tolist()  # the first grants
        if len(self._batch) >= len(self._streams) and (pause_s := self._pause_s("slots_per_s", now, self._grant_at)):
            self._grant_at = now + pause_s * len(self._batch)
            for stream in self._batch:
                ring.grant(stream, ring.num_slots)
            self._batch = []
        if pause_s := self._pause_s("versions_per_s", now, self._publish_at):
            self._publish_at = now + pause_s
            self._publish()
        num = self._take()
        if not num:
            ring.ready.wait(min(timeout_s, 0.01 if panel["slots_per_s"] or panel["versions_per_s"] else timeout_s))
        self._tick()
        return num > 0

    def _pause_s(self, name: str, now: float, due_at: float) -> float:
        """Returns the seconds until the next event of a kind that is due; 0 if it is not due."""
        rate = self._panel[name]
        if not rate or now < due_at:
            return 0.0
        return 1e-9 if rate == UNLIMITED else 1.0 / rate

    def _publish(self) -> None:
        version = self._board.version + 1
        self._board.publish([self._weights], version)
        self._panel["versions"] = version

    def _take(self) -> int:
        """Checks and releases the slots that are ready; returns their number."""
        ring = self._ring
        ring.ready.clear()
        ready = self._streams[ring.head[self._streams] > ring.released[self._streams]].tolist()
        for stream in ready:
            slot = ring.readable(stream)["slot"]
            self._wrong += not is_stamped(slot, self._filled, stream, int(ring.released[stream]))
            ring.release(stream)
        self._batch += ready
        self._slots += len(ready)
        self._panel["slots"], self._panel["wrong"] = self._slots, self._wrong
        return len(ready)

    def _end(self) -> bool:
        """Takes what was granted, and ends the run when all of it has come, or scale.py has lost its patience."""
        num, ring = self._take(), self._ring
        missing = int((ring.granted[self._streams] - ring.released[self._streams]).sum())
        if missing and self._panel["is_over"] < 2:
            time.sleep(0.0 if num else 0.01)
            self._tick()
        else:
            self._world.post("coordinator", "finished", {"reason": "steps", "missing": missing})
            self.finished = True
        return num > 0


def filled(slots: SlotBytes) -> Array:
    """Returns the content of every slot, apart from its stamp: in stacks, each frame follows the one before."""
    content = np.random.default_rng(0).integers(0, 256, slots.nbytes, np.uint8)
    for stack in slots.stacks:
        rows = stack.of(content)
        for t in range(1, stack.rows):
            rows[t, :, :-1] = rows[t - 1, :, 1:]
    return content


def stamp(slot: Array, stream: int, number: int) -> None:
    slot[:STAMP_BYTES].view(np.int64)[:] = stream, number, hash((stream, number))


def is_stamped(slot: Array, content: Array, stream: int, number: int) -> bool:
    """Returns whether a slot is the one of this number, and whole."""
    expected = np.array([stream, number, hash((stream, number))])
    return bool(
        np.array_equal(slot[:STAMP_BYTES].view(np.int64), expected)
        and np.array_equal(slot[STAMP_BYTES:], content[STAMP_BYTES:])
    )


actor: Callable[[dict[str, Any]], Stub] = StubActor
learner: Callable[[dict[str, Any]], Stub] = StubLearner
