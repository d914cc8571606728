"""The rate limiter: keeps the number of samples per inserted item within a band, in shared memory.

Counted from `min_size` items on, the *balance* is samples_per_insert * items inserted - items sampled or written off.
An actor may append while the balance stays at or below +tolerance; a learner may sample while it stays at or above
-tolerance, or at or above 0 if the rule is `exact`. Below `min_size`, actors append freely and learners do not sample.
Shared words, one cache line each: `inserted` of a shard is its head, written by its actor; `sampled` of a learner
counts the items it sampled, and `written_off` the samples that were due for evicted items, both written by that
learner.

Who waits: an actor waits on the futex word `insert`, which `note_sampled` wakes when an append fits; a learner waits on
the futex word `sample`, which `note_inserted` wakes. Both waits have a timeout, so that a role keeps its heartbeat. If
an actor dies, its count stays and the other actors append in its place; if a learner dies, the actors append up to the
end of the band and wait for its successor. Several processes may pass a check simultaneously: the band is then exceeded
by at most one append per actor, or one batch per learner. The carrier, which grants slots to actors of other hosts,
sleeps on messages too, so while it lacks room (`watch_samples`) every sample rings its doorbell.

With shard servers (replay.transport=tcp), the learner's side and the actors' side each have a copy of these words. The
counts of the other side arrive with the messages between learner and shard server, and the receiver writes them
(`note_inserted`, `note_spent`). A late count makes one side wait longer, or lets it exceed the band by what is in
flight. Learners and shard servers also sleep on their connections, so an append rings the doorbells of those that
called `listen`. Imports only numpy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from echelon.errors import ConfigError
from echelon.layout import ALIGNMENT
from echelon.replay.shard import join
from echelon.transport.futex import Word, fence
from echelon.transport.shared_memory import Doorbell

Array = np.ndarray[Any, Any]
ROUNDING = 1e-3  # samples: the balance is a float, and its rounding must not close a band that is just wide enough


@dataclass(frozen=True, slots=True)
class LimiterRule:
    """The band of the limiter, and the sizes of the steps that move the balance."""

    samples_per_insert: float  # 0: no band, only min_size
    min_size: int  # items inserted before the first is sampled
    capacity: int  # items, over all shards
    batch: int  # the most items that a learner samples in one call
    chunk: int  # the most items that an actor appends in one call
    num_shards: int = 1
    num_learners: int = 1
    tolerance: float = 0.0  # samples; 0: enough for one step of every actor and every learner
    exact: bool = False  # whether learners never sample ahead

    def __post_init__(self) -> None:
        ratio, least = self.samples_per_insert, self.batch + self.chunk * self.samples_per_insert
        if not (ratio >= 0.0 and np.isfinite(ratio)) or min(self.batch, self.chunk) < 1:
            raise ConfigError(
                f"replay.samples_per_insert={ratio} with batches of {self.batch} and appends of {self.chunk}: the "
                "ratio must be 0 (no limit) or more, and the sizes 1 or more."
            )
        if max(self.min_size, self.batch, self.chunk) > self.capacity:
            raise ConfigError(
                f"replay.min_size={self.min_size}, replay.batch={self.batch} and appends of {self.chunk} must each fit "
                f"into replay.capacity={self.capacity}: otherwise the learner would wait forever. Raise the capacity."
            )
        sides = 1 if self.exact else 2
        if self.tolerance and ratio and sides * self.tolerance < least:
            raise ConfigError(
                f"replay: a tolerance of {self.tolerance:g} samples would deadlock: the band is "
                f"{sides * self.tolerance:g} wide, a batch lowers the balance by {self.batch} and an append of "
                f"{self.chunk} items raises it by {self.chunk * ratio:g}, so at some balances neither fits. Set it to "
                f"{least / sides:g} or more, or lower replay.batch or replay.samples_per_insert."
            )

    @property
    def num_counts(self) -> int:
        """The number of counts: insertions of every shard, then samples, then write-offs of every learner."""
        return self.num_shards + 2 * self.num_learners

    @property
    def room(self) -> float:
        """How far the balance may deviate from 0."""
        every_step = self.batch * self.num_learners + self.chunk * self.samples_per_insert * self.num_shards
        return (self.tolerance or every_step) + ROUNDING


class Limiter:
    """The counts of one run, shared by every actor and learner of this host."""

    def __init__(self, rule: LimiterRule, memory: Array | None = None, folder: Path | None = None) -> None:
        self.rule, self._folder = rule, folder
        memory = np.zeros(self.size(rule), np.uint8) if memory is None else memory
        lines = memory.reshape(-1, ALIGNMENT)
        words = lines[2:].view(np.int64)[:, 0]
        ends = [rule.num_counts, rule.num_counts + rule.num_learners + 1]
        self._counts, self._listening, self._watched = np.split(words, ends)
        self._inserted, self._spent = np.split(self._counts, [rule.num_shards])
        self._sampled, self._written_off = np.split(self._spent, 2)
        self._doorbells: dict[int, Doorbell] = {}
        self._insert_bell, self._sample_bell = (Word(lines[i, :4].view(np.int32)) for i in range(2))

    @staticmethod
    def size(rule: LimiterRule) -> int:
        """Returns the size in bytes: two bells, the counts, and flags of those that sleep on doorbells.

        The flags are those of the learners, the shard server and the carrier.
        """
        return (2 + rule.num_counts + rule.num_learners + 2) * ALIGNMENT

    @classmethod
    def at(cls, folder: Path, rule: LimiterRule) -> Limiter:
        """Opens the limiter of a run; the first process creates it."""
        return cls(rule, join(folder / "limiter", cls.size(rule)), folder)

    @property
    def inserted(self) -> int:
        return int(self._inserted.sum())

    @property
    def inserted_by_shard(self) -> Array:
        return self._inserted.copy()

    @property
    def sampled(self) -> int:
        return int(self._sampled.sum())

    @property
    def written_off(self) -> int:
        return int(self._written_off.sum())

    @property
    def balance(self) -> float:
        """The samples that are due for the inserted items; negative if more were taken than due."""
        return self.rule.samples_per_insert * (self.inserted - self.rule.min_size) - int(self._spent.sum())

    # The actor's side.

    def may_insert(self, count: int) -> bool:
        """Returns whether `count` items may be appended, in one append or in several."""
        rule = self.rule
        before_last = max(0, count - rule.chunk)
        if rule.samples_per_insert == 0.0 or self.inserted + before_last < rule.min_size:
            return True
        return self.balance + rule.samples_per_insert * count <= rule.room

    def wait_to_insert(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` until a whole append may be made; returns whether it may."""
        return self._wait(self._insert_bell, lambda: self.may_insert(self.rule.chunk), timeout_s)

    def note_inserted(self, shard: int, head: int) -> None:
        """Records that the actor of `shard` appended items up to `head`, and wakes the learners."""
        self._inserted[shard] = head
        self._sample_bell.value = (head * len(self._inserted) + shard) & 0x7FFFFFFF  # a new value for every ring
        self._sample_bell.wake()
        listening = self._listening.tolist()
        if 1 in listening:
            for listener, listens in enumerate(listening):
                if listens:
                    self._doorbell(listener).ring()

    # The learner's side.

    def may_sample(self, count: int) -> bool:
        rule = self.rule
        if self.inserted < rule.min_size:
            return False
        least = -ROUNDING if rule.exact else -rule.room
        return rule.samples_per_insert == 0.0 or self.balance - count >= least

    def wait_for_items(self, may: Callable[[], bool], timeout_s: float) -> bool:
        """Waits up to `timeout_s` until `may()` is True, evaluated again after every append; returns its result."""
        return self._wait(self._sample_bell, may, timeout_s)

    def note_sampled(self, learner: int, count: int) -> None:
        """Records that `learner` sampled `count` items, and wakes the actors."""
        self.note_spent(learner, int(self._sampled[learner]) + count)

    def write_off(self, learner: int) -> None:
        """Writes off the outstanding samples: their items were evicted, and new items must be appended first."""
        if self.balance > 0.0:
            total = int(self._written_off[learner]) + math.ceil(self.balance)
            self.note_spent(self.rule.num_learners + learner, total)

    def note_spent(self, place: int, total: int) -> None:
        """Sets the count at `place` to `total`, and wakes the actors if an append fits now.

        Places number the samples of every learner first, then the write-offs of every learner.
        """
        self._spent[place] = total
        self._insert_bell.value = (total * len(self._spent) + place) & 0x7FFFFFFF
        fence()  # of two learners that make the room together, at least one sees it
        if self.may_insert(self.rule.chunk):  # most updates leave no room, and to wake every actor takes time
            self._insert_bell.wake()
        if self._watched[0]:
            self.sampled_bell.ring()

    @staticmethod
    def _wait(bell: Word, may: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            seen = bell.value
            if may():
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0.0:
                return False
            bell.wait(seen, left_s)

    def restart(self, learner: int, sampled: int) -> None:
        """Sets the items that all learners sampled to `sampled`, for learners that repeat lost updates."""
        self._sampled[:] = 0
        self.note_spent(learner, sampled)

    # Between hosts.

    @cached_property
    def sampled_bell(self) -> Doorbell:
        """The doorbell that `note_spent` rings while `watch_samples` is set."""
        assert self._folder is not None, "a limiter in private memory has no doorbells"
        return Doorbell(self._folder / "sampled")

    def watch_samples(self, is_watched: bool) -> None:
        """Sets whether samples ring `sampled_bell`. Set it before `may_insert`, so that no ring is missed."""
        self._watched[0] = is_watched

    def counts(self) -> Array:
        """Returns the counts known on this host, in the order of `LimiterRule.num_counts`."""
        return self._counts.copy()

    def listen(self, learner: int | None) -> Doorbell:
        """Returns the doorbell of `learner`, or of the host's shard server (None); from now on appends here ring it."""
        listener = self.rule.num_learners if learner is None else learner
        doorbell = self._doorbell(listener)
        self._listening[listener] = 1
        return doorbell

    def _doorbell(self, listener: int) -> Doorbell:
        if listener not in self._doorbells:
            assert self._folder is not None, "a limiter in private memory has no doorbells"
            self._doorbells[listener] = Doorbell(self._folder / f"appended-{listener}")
        return self._doorbells[listener]

    # Checkpoints.

    def state(self) -> dict[str, list[int]]:
        counts = {"inserted": self._inserted, "sampled": self._sampled, "written_off": self._written_off}
        return {name: words.tolist() for name, words in counts.items()}

    def load(self, state: dict[str, list[int]]) -> None:
        """Restores the counts of a checkpoint. Call it before any actor or learner changes a count.

        The number of shards must be the same. The number of learners may differ, because only their sums matter.
        """
        if len(state["inserted"]) != len(self._inserted):
            raise ConfigError(
                f"replay limiter: the checkpoint has {len(state['inserted'])} shards, but this run has "
                f"{len(self._inserted)}."
            )
        others = [0] * (self.rule.num_learners - 1)
        spent = [total for name in ("sampled", "written_off") for total in (sum(state[name]), *others)]
        self._counts[:] = [*state["inserted"], *spent]
