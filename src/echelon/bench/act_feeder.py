"""A feeder simulates an actor whose environments cost nothing: it writes prepared observations, requests and waits.

Like an actor with central acting it has two groups and fills one while the other waits for actions. It waits for the
inference server's replies; if the server dies, it sleeps until its parent ends it. Imports no torch.

Shapes: F feeders, K rows of a seat.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np

from echelon.layout import ALIGNMENT, Leaf, place, size_of, views_of
from echelon.transport.act_board import ActBoard, ActLayout, Seat
from echelon.transport.segments import join_segment

Array = np.ndarray[Any, Any]
NUM_GROUPS = 2
NUM_SAMPLES = 1 << 14  # newest latencies that are kept per feeder
POOL_BYTES = (
    1 << 26
)  # prepared observations per feeder: more than the caches hold, as an environment's frames are not cached
WARM_UP, MEASURE, STOP = range(3)


@dataclass(frozen=True, slots=True)
class Feed:
    """The observations of the feeders: one leaf each, in seats of `rows`."""

    shape: tuple[int, ...]
    dtype: str
    rows: int
    num_feeders: int
    spin_us: float = 0.0  # how long a feeder polls for its reply before it sleeps

    @property
    def layout(self) -> ActLayout:
        return ActLayout(
            (Leaf("observation", tuple(self.shape), np.dtype(self.dtype)),),
            Leaf("action", (), np.dtype(np.int64)),
            rows=self.rows,
            num_clients=self.num_feeders,
            num_groups=NUM_GROUPS,
        )

    def fill(self, out: Array, rng: np.random.Generator) -> None:
        """Random observations."""
        if out.dtype == np.uint8:
            out[...] = rng.integers(0, 256, out.shape, np.uint8)
        else:
            rng.random(out=out, dtype=np.float32)


class FeederCounts:
    """Counters of the feeders during a measurement, in a segment that the benchmark reads."""

    def __init__(self, folder: Path, num_feeders: int) -> None:
        path = folder / "tally"
        fields = place(
            [
                ("phase", (1,), np.int64),
                ("words", (num_feeders, ALIGNMENT // 8), np.int64),
                ("latency_ns", (num_feeders, NUM_SAMPLES), np.int64),
            ]
        )
        views = views_of(fields, join_segment(path, size_of(fields)))
        self.phase = views["phase"]  # written by the benchmark
        # Written by each feeder: requests served, time writing observations, time waiting, total time.
        self.answered, self.laying_ns, self.waiting_ns, self.total_ns = (views["words"][:, i] for i in range(4))
        self.latency_ns = views["latency_ns"]

    def latencies(self) -> Array:
        """Returns all kept latencies, in nanoseconds."""
        kept = [row[: int(count)] for row, count in zip(self.latency_ns, self.answered, strict=True)]
        return np.concatenate(kept)


class Feeder:
    """The feeder role: a step is one group's turn."""

    def __init__(self, config: dict[str, Any]) -> None:
        feed, folder = Feed(**config["feed"]), Path(config["session"])
        self.index = int(config["index"])
        self.tally = FeederCounts(folder, feed.num_feeders)
        board = ActBoard(folder, feed.layout)
        shape = (feed.rows, *feed.shape)
        nbytes = int(np.prod(shape)) * np.dtype(feed.dtype).itemsize
        self.pool = np.empty((max(2, min(64, POOL_BYTES // nbytes)), *shape), feed.dtype)
        feed.fill(self.pool, np.random.default_rng(self.index))
        self.seats = [Seat(board, self.index, group) for group in range(NUM_GROUPS)]
        self.asked_ns = [0] * NUM_GROUPS
        self.actions = np.zeros(feed.rows, np.int64)
        self.turn, self.spin_ns = 0, int(1e3 * feed.spin_us)
        self.finished = False

    def step(self, timeout_s: float) -> bool:
        group = self.turn % NUM_GROUPS
        seat, tally, index = self.seats[group], self.tally, self.index
        start_ns = monotonic_ns()
        while not seat.answered and monotonic_ns() < start_ns + self.spin_ns:
            pass
        answered = seat.wait(timeout_s)
        answered_ns = monotonic_ns()
        phase = int(tally.phase[0])
        if phase == STOP:
            self.finished = True
            return True
        if not answered:
            return False
        self.actions[...] = seat.action
        np.copyto(seat.observation[0], self.pool[self.turn % len(self.pool)])
        laid_ns = monotonic_ns()
        seat.ask()
        if phase == MEASURE and self.asked_ns[group]:
            count = int(tally.answered[index])
            tally.latency_ns[index, count % NUM_SAMPLES] = answered_ns - self.asked_ns[group]
            tally.answered[index] = count + 1
            tally.waiting_ns[index] += answered_ns - start_ns
            tally.laying_ns[index] += laid_ns - answered_ns
            tally.total_ns[index] += monotonic_ns() - start_ns
        self.asked_ns[group] = laid_ns
        self.turn += 1
        return True

    def close(self) -> None:
        for seat in self.seats:
            seat.leave()
