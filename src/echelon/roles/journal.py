"""The journal: which messages of which workers are in the learner's hands, in shared memory that outlives the gateway.

Before a message changes anything, the gateway notes what will be true after it (the *intent*); then it appends to its
replay shard, which shows all of it or nothing; then it makes true what it noted. A gateway that is killed in between
leaves the intent to its successor, which finds the shard's head moved or not, and so knows whether to finish it or to
forget it. So no message counts twice, and none that was answered is lost. Of evaluations the newest are kept as they
were, for the record of a run, which a successor tells again. One process writes. Needs only numpy.
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
GATEWAY = 0  # the actor that the tally and the replay take the gateway for
NUM_ROWS = 4_096  # workers that are remembered; of more, the one that was silent longest makes room
NUM_KEPT = 256  # evaluations
TOTALS = np.dtype([(name, np.int64) for name in ("episodes", "evaluations", "interactions", "repeated")])
EVALUATED = np.dtype(
    [("worker", f"U{MAX_NAME}"), ("version", np.int64), ("value", np.float64), ("length", np.int64)], align=True
)
INTENT = np.dtype(
    [
        ("row", np.int64),
        ("number", np.int64),
        ("evaluates", np.bool_),
        ("head", np.int64),  # of the shard, once the message is in
        ("env_steps", np.int64),  # of the tally
        ("episodes", np.int64),
        ("ended", np.bool_),  # whether an episode ends that is learned from, with the two that follow
        ("evaluated", np.bool_),  # whether one ends that is an evaluation, with all that follow
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
        ("heard", np.float64),  # when, by the monotonic clock
        ("number", np.int64),  # of its last message that is in
        ("evaluates", np.bool_),  # what it was told then
        ("known", np.bool_),
    ],
    align=True,
)
FIELDS = place(
    [
        ("began", (1,), np.float64),  # when, by the monotonic clock
        ("pending", (1,), np.bool_),
        ("totals", (1,), TOTALS),
        ("intent", (1,), INTENT),
        ("evaluated", (NUM_KEPT,), EVALUATED),
        ("workers", (NUM_ROWS,), WORKER),
    ]
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Whose an evaluation is, and of which weights."""

    worker: str
    version: int


@dataclass(frozen=True, slots=True)
class Entry:
    """What a message brings."""

    row: int
    number: int
    head: int  # of the shard, once it is in
    num_steps: int
    ended: tuple[float, int] | None = None  # return and length, where an episode ends
    evaluation: Evaluation | None = None  # where the episode is not learned from


class Journal:
    """What workers have brought to the gateway of one run."""

    def __init__(self, tally: Tally, evaluation: float, memory: Array | None = None) -> None:
        """`evaluation` is the part of all episodes that is an evaluation."""
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
        """The journal of a run; whoever comes first makes it."""
        return cls(tally, evaluation, join(folder / "journal", cls.size()))

    # Workers.

    def row_of(self, worker: str) -> int | None:
        """The row of a worker that has arrived."""
        row = self._rows.get(socket_name(worker))
        if row is not None:
            self._workers["heard"][row] = time.monotonic()
        return row

    def enter(self, worker: str) -> int:
        """The row of a worker that arrives, or arrives again."""
        row = self.row_of(worker)
        if row is not None:
            return row
        if not self._began[0]:
            self._began[0] = time.monotonic()
        workers, name = self._workers, socket_name(worker)
        free = np.flatnonzero(~workers["known"])
        row = int(free[0]) if len(free) else int(workers["heard"].argmin())
        self._rows.pop(workers["socket"][row].tobytes(), None)
        workers["known"][row] = False
        workers[row] = (name, time.monotonic(), 0, False, False)
        workers["known"][row] = True
        self._rows[name] = row
        return row

    def leave(self, worker: str) -> bool:
        """Forgets a worker that has gone; False: it was not known."""
        row = self._rows.pop(socket_name(worker), None)
        if row is not None:
            self._workers["known"][row] = False
        return row is not None

    def sockets(self, seconds: float) -> list[bytes]:
        """The names of the sockets of workers that said something lately."""
        heard = self._workers["heard"] > time.monotonic() - seconds
        return [name for name, row in self._rows.items() if heard[row]]

    def row_at(self, socket: bytes) -> int:
        """The row of the worker whose socket has that name."""
        return self._rows[socket]

    def last(self, row: int) -> int:
        """The number of the worker's last message that is in."""
        return int(self._workers["number"][row])

    def evaluates(self, row: int) -> bool:
        """Whether the worker was last told to evaluate."""
        return bool(self._workers["evaluates"][row])

    # Messages.

    def begin(self, entry: Entry) -> None:
        """Notes what will be true when what `entry` brings lies in the shard."""
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
        """Whether an evaluation follows that many episodes: so that they keep to their part exactly."""
        before, now = (int(self.evaluation * count + 1e-9) for count in (episode - 1, episode))
        return now > before

    def finish(self) -> None:
        """Makes true what `begin` noted; twice is as good as once."""
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
        """Finishes or forgets what a predecessor was at when it died; `head` is that of the shard."""
        if self._pending[0] and head >= self._intent["head"][0]:
            self.finish()
        self._pending[0] = False

    def repeated(self) -> None:
        """A message came again."""
        self._totals["repeated"] += 1

    # What is counted.

    def totals(self) -> dict[str, int]:
        """Episodes in all, evaluations among them, steps in all, messages that came again."""
        return {name: int(self._totals[name][0]) for name in TOTALS.names or ()}

    def evaluations(self, after: int) -> list[tuple[int, dict[str, Any]]]:
        """The evaluations behind number `after`, as far as they are kept, with their numbers, which begin with 1."""
        newest = self.totals()["evaluations"]
        numbers = range(max(after, newest - NUM_KEPT) + 1, newest + 1)
        names, kept = EVALUATED.names or (), self._evaluated
        return [(n, dict(zip(names, kept[(n - 1) % NUM_KEPT].item(), strict=True))) for n in numbers]

    @property
    def seconds(self) -> float:
        """Since the first worker arrived."""
        return time.monotonic() - float(self._began[0]) if self._began[0] else 0.0
