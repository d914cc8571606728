"""The journal: records which messages of which workers are stored, in shared memory that outlives the gateway.

It is a write-ahead log with one entry. Before a message changes anything, the gateway writes the state that will hold
after it (the *intent*). Then it appends to its replay shard, which is atomic. Then it applies the intent. If the
gateway is killed in between, its successor compares the shard's head with the intent: it applies the intent if the head
has moved, and discards it otherwise. Hence no message counts twice, and none that was acknowledged is lost. The newest
evaluations are kept so that a successor can report them again. One process writes. Needs only numpy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from echelon.layout import place, size_of, views_of
from echelon.replay.shard import join
from echelon.roles.tally import Tally
from echelon.transport.episode_wire import MAX_NAME, socket_name

Array = np.ndarray[Any, Any]
GATEWAY = 0  # the actor index of the gateway in the tally and the replay
NUM_ROWS = 4_096  # known workers; beyond that, the worker that was silent longest is evicted
NUM_KEPT = 256  # newest evaluations
TOTALS = np.dtype([(name, np.int64) for name in ("episodes", "evaluations", "interactions", "repeated")])
EVALUATED = np.dtype(
    [("worker", f"U{MAX_NAME}"), ("version", np.int64), ("value", np.float64), ("length", np.int64)], align=True
)
INTENT = np.dtype(
    [
        ("row", np.int64),
        ("number", np.int64),
        ("evaluates", np.bool_),
        ("head", np.int64),  # of the shard, after the message is stored
        ("env_steps", np.int64),  # of the tally
        ("episodes", np.int64),
        ("ended", np.bool_),  # whether a training episode ends, with this `value` and `length`
        ("evaluated", np.bool_),  # whether an evaluation ends, with this `value`, `length`, `worker` and `version`
        ("value", np.float64),
        ("length", np.int64),
        ("worker", f"U{MAX_NAME}"),
        ("version", np.int64),
        ("totals", TOTALS),
    ],
    align=True,
)
WORKER = np.dtype(
    [
        ("socket", "V17"),  # the name of its socket
        ("last_seen", np.float64),  # monotonic clock
        ("number", np.int64),  # of its last stored message
        ("evaluates", np.bool_),  # whether the reply to it asked for an evaluation
        ("known", np.bool_),
    ],
    align=True,
)
FIELDS = place(
    [
        ("began", (1,), np.float64),  # when the first worker arrived, monotonic clock
        ("pending", (1,), np.bool_),
        ("totals", (1,), TOTALS),
        ("intent", (1,), INTENT),
        ("evaluated", (NUM_KEPT,), EVALUATED),
        ("workers", (NUM_ROWS,), WORKER),
    ]
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The worker of an evaluation, and the version of the weights that it evaluated."""

    worker: str
    version: int


@dataclass(frozen=True, slots=True)
class Entry:
    """The effect of one message."""

    row: int
    number: int
    head: int  # of the shard, after the message is stored
    num_steps: int
    ended: tuple[float, int] | None = None  # return and length, if an episode ends
    evaluation: Evaluation | None = None  # set if the episode is an evaluation and not training data


class Journal:
    """The workers of one run, their stored messages and the totals of the gateway."""

    def __init__(self, tally: Tally, evaluation: float, memory: Array | None = None) -> None:
        """`evaluation` is the fraction of all episodes that are evaluations."""
        views = views_of(FIELDS, np.zeros(self.size(), np.uint8) if memory is None else memory)
        self.tally, self.evaluation = tally, evaluation
        self._began, self._pending, self._workers = views["began"], views["pending"], views["workers"]
        self._totals, self._intent, self._evaluated = views["totals"], views["intent"], views["evaluated"]
        self._rows = {
            self._workers["socket"][row].tobytes(): int(row) for row in np.flatnonzero(self._workers["known"])
        }

    @staticmethod
    def size() -> int:
        return size_of(FIELDS)

    @classmethod
    def at(cls, folder: Path, tally: Tally, evaluation: float) -> Journal:
        """Opens the journal of a run; the first process to call this creates it."""
        return cls(tally, evaluation, join(folder / "journal", cls.size()))

    # Workers.

    def row_of(self, worker: str) -> int | None:
        """Returns the row of a worker and updates its `last_seen`, or returns None if the worker is not known."""
        row = self._rows.get(socket_name(worker))
        if row is not None:
            self._workers["last_seen"][row] = time.monotonic()
        return row

    def enter(self, worker: str) -> int:
        """Returns the row of a worker that arrives, and adds it if it is not known."""
        row = self.row_of(worker)
        if row is not None:
            return row
        if not self._began[0]:
            self._began[0] = time.monotonic()
        workers, name = self._workers, socket_name(worker)
        free = np.flatnonzero(~workers["known"])
        row = int(free[0]) if len(free) else int(workers["last_seen"].argmin())
        self._rows.pop(workers["socket"][row].tobytes(), None)
        workers["known"][row] = False
        workers[row] = (name, time.monotonic(), 0, False, False)
        workers["known"][row] = True
        self._rows[name] = row
        return row

    def leave(self, worker: str) -> bool:
        """Forgets a worker that left. Returns False if it was not known."""
        row = self._rows.pop(socket_name(worker), None)
        if row is not None:
            self._workers["known"][row] = False
        return row is not None

    def sockets(self, seconds: float) -> list[bytes]:
        """Returns the socket names of workers that sent a message within the last `seconds`."""
        is_active = self._workers["last_seen"] > time.monotonic() - seconds
        return [name for name, row in self._rows.items() if is_active[row]]

    def row_at(self, socket: bytes) -> int:
        """Returns the row of the worker with this socket name."""
        return self._rows[socket]

    def last(self, row: int) -> int:
        """Returns the number of the worker's last stored message."""
        return int(self._workers["number"][row])

    def evaluates(self, row: int) -> bool:
        """Returns whether the last reply asked the worker for an evaluation."""
        return bool(self._workers["evaluates"][row])

    # Messages.

    def begin(self, entry: Entry) -> None:
        """Writes the intent: the state that holds once the content of `entry` is in the shard."""
        intent, totals = self._intent, self._totals[0].copy()
        env_steps, episodes = self.tally.counts_of(GATEWAY)
        learned, ends = entry.evaluation is None, entry.ended is not None
        totals["episodes"] += ends
        totals["evaluations"] += not learned
        totals["interactions"] += entry.num_steps
        intent["row"], intent["number"], intent["head"] = entry.row, entry.number, entry.head
        intent["evaluates"] = ends and self._is_due(int(totals["episodes"]))
        intent["env_steps"] = env_steps + (entry.num_steps if learned else 0)
        intent["episodes"], intent["ended"] = episodes + (ends and learned), ends and learned
        intent["value"], intent["length"] = entry.ended or (0.0, 0)
        intent["evaluated"], evaluation = not learned, entry.evaluation or Evaluation("", 0)
        intent["worker"], intent["version"] = evaluation.worker, evaluation.version
        intent["totals"] = totals
        self._pending[0] = True

    def _is_due(self, episode: int) -> bool:
        """Returns whether an evaluation follows episode number `episode`, which keeps their fraction exact."""
        before, now = (int(self.evaluation * count + 1e-9) for count in (episode - 1, episode))
        return now > before

    def finish(self) -> None:
        """Applies the intent. Idempotent."""
        intent = self._intent[0]
        ended = (float(intent["value"]), int(intent["length"])) if intent["ended"] else None
        self.tally.settle(GATEWAY, (int(intent["env_steps"]), int(intent["episodes"])), ended)
        if intent["evaluated"]:
            kept = (int(intent["totals"]["evaluations"]) - 1) % NUM_KEPT
            self._evaluated[kept] = intent[list(EVALUATED.names or ())]
        self._totals[0] = intent["totals"]
        row = int(intent["row"])
        self._workers["evaluates"][row] = intent["evaluates"]
        self._workers["number"][row] = intent["number"]
        self._pending[0] = False

    def recover(self, head: int) -> None:
        """Applies or discards the intent that a dead predecessor left; `head` is the head of the shard."""
        if self._pending[0] and head >= self._intent["head"][0]:
            self.finish()
        self._pending[0] = False

    def repeated(self) -> None:
        """Counts a message that was received again."""
        self._totals["repeated"] += 1

    # Totals.

    def totals(self) -> dict[str, int]:
        """Returns the number of episodes including evaluations, of evaluations, of steps and of repeated messages."""
        return {name: int(self._totals[name][0]) for name in TOTALS.names or ()}

    def evaluations(self, after: int) -> list[tuple[int, dict[str, Any]]]:
        """Returns the kept evaluations after number `after`, each with its number; numbers start at 1."""
        newest = self.totals()["evaluations"]
        numbers = range(max(after, newest - NUM_KEPT) + 1, newest + 1)
        names, kept = EVALUATED.names or (), self._evaluated
        return [(n, dict(zip(names, kept[(n - 1) % NUM_KEPT].item(), strict=True))) for n in numbers]

    @property
    def seconds(self) -> float:
        """Seconds since the first worker arrived, or 0."""
        return time.monotonic() - float(self._began[0]) if self._began[0] else 0.0
