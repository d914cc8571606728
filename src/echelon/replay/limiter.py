"""The limiter: keeps the samples drawn per item inserted within a band, on both sides, in shared memory.

Counted from `min_size` items on, the *balance* is samples_per_insert * items inserted - items drawn or written off. An
actor may append while the balance stays at or below +tolerance, a learner may draw while it stays at or above
-tolerance; below `min_size` everybody appends and nobody draws. Words, one cache line each: `inserted` of a shard is
its head, written by its actor; `sampled` of a learner counts the items that it drew, `written_off` those that were due
for items that are gone, both written by that learner.

Who waits: an actor on the `insert` bell, which `note_sampled` rings; a learner on the `sample` bell, which
`note_inserted` rings. Both waits end with their time, so that a role keeps its heartbeat. If an actor dies, its count
stays and the others append in its place; if a learner dies, the actors run on to the end of the band and wait for its
successor. Those who look at the same moment may pass together: the band is overrun by at most one append of each actor,
or one batch of each learner.

Every host has these words. The counts of other hosts come with the messages between a learner and their shard servers
(`note_inserted`, `note_spent`), and are written by whoever receives them; a count that comes late makes either side
more careful, or lets it run on by what is under way. Both sleep on their connections as well, so an append rings the
doorbells of those who `listen`. Needs only numpy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from echelon.errors import ConfigError
from echelon.layout import ALIGNMENT
from echelon.replay.layout import ReplayError
from echelon.replay.shard import join
from echelon.transport.futex import Word
from echelon.transport.shared_memory import Doorbell

Array = np.ndarray[Any, Any]
ROUNDING = 1e-3  # samples: the balance is a float, and a band just wide enough must not close by it


@dataclass(frozen=True, slots=True)
class LimiterRule:
    """The band, and what moves within it."""

    samples_per_insert: float  # 0: no band, only min_size
    min_size: int  # items inserted before the first is drawn
    capacity: int  # items, over all shards
    batch: int  # the most items that a learner draws at once
    chunk: int  # the most items that an actor appends at once
    num_shards: int = 1
    num_learners: int = 1
    tolerance: float = 0.0  # samples; 0: so that every actor and every learner has room for one step

    def __post_init__(self) -> None:
        ratio, least = self.samples_per_insert, self.batch + self.chunk * self.samples_per_insert
        if not (ratio >= 0.0 and np.isfinite(ratio)) or min(self.batch, self.chunk) < 1:
            raise ConfigError(
                f"replay.samples_per_insert={ratio} with batches of {self.batch} and appends of {self.chunk}: the "
                "ratio must be 0 (no limit) or more, and the others 1 or more."
            )
        if max(self.min_size, self.batch, self.chunk) > self.capacity:
            raise ConfigError(
                f"replay.min_size={self.min_size}, replay.batch={self.batch} and appends of {self.chunk} must each fit "
                f"into replay.capacity={self.capacity}: otherwise the learner would wait forever. Raise the capacity."
            )
        if self.tolerance and ratio and 2.0 * self.tolerance < least:
            raise ConfigError(
                f"replay: a tolerance of {self.tolerance:g} samples must deadlock: the band is {2 * self.tolerance:g} "
                f"wide, a batch takes {self.batch} from the balance and an append of {self.chunk} items gives it "
                f"{self.chunk * ratio:g}, so there are balances from which neither fits. Set it to {least / 2:g} or "
                "more, or lower replay.batch or replay.samples_per_insert."
            )

    @property
    def num_counts(self) -> int:
        """What is counted: insertions into every shard, then draws and then write-offs of every learner."""
        return self.num_shards + 2 * self.num_learners

    @property
    def room(self) -> float:
        """How far the balance may go to either side."""
        every_step = self.batch * self.num_learners + self.chunk * self.samples_per_insert * self.num_shards
        return (self.tolerance or every_step) + ROUNDING


class Limiter:
    """The counts of one run, as every actor and every learner sees them."""

    def __init__(self, rule: LimiterRule, memory: Array | None = None, folder: Path | None = None) -> None:
        self.rule, self._folder = rule, folder
        memory = np.zeros(self.size(rule), np.uint8) if memory is None else memory
        lines = memory.reshape(-1, ALIGNMENT)
        words = lines[2:].view(np.int64)[:, 0]
        self._counts, self._listening = np.split(words, [rule.num_counts])
        self._inserted, self._spent = np.split(self._counts, [rule.num_shards])
        self._sampled, self._written_off = np.split(self._spent, 2)
        self._doorbells: dict[int, Doorbell] = {}
        self._insert_bell, self._sample_bell = (Word(lines[i, :4].view(np.int32)) for i in range(2))

    @staticmethod
    def size(rule: LimiterRule) -> int:
        """Two bells, the counts, and who listens: every learner, the shard server."""
        return (2 + rule.num_counts + rule.num_learners + 1) * ALIGNMENT

    @classmethod
    def at(cls, folder: Path, rule: LimiterRule) -> Limiter:
        """The limiter of a run; whoever comes first makes it."""
        return cls(rule, join(folder / "limiter", cls.size(rule)), folder)

    @property
    def inserted(self) -> int:
        return int(self._inserted.sum())

    @property
    def sampled(self) -> int:
        return int(self._sampled.sum())

    @property
    def written_off(self) -> int:
        return int(self._written_off.sum())

    @property
    def balance(self) -> float:
        """The samples that are due, by the items inserted; negative: that were drawn too early."""
        return self.rule.samples_per_insert * (self.inserted - self.rule.min_size) - int(self._spent.sum())

    # The actor's side.

    def may_insert(self, count: int) -> bool:
        rule = self.rule
        if rule.samples_per_insert == 0.0 or self.inserted < rule.min_size:
            return True
        return self.balance + rule.samples_per_insert * count <= rule.room

    def wait_to_insert(self, count: int, timeout_s: float) -> bool:
        """Sleeps until `count` items may be appended, at most `timeout_s`; whether they may."""
        if count > self.rule.chunk:
            raise ReplayError(
                f"replay limiter: an append of {count} items, where at most {self.rule.chunk} were declared, could "
                "wait forever. Append fewer at once."
            )
        return self._wait(self._insert_bell, lambda: self.may_insert(count), timeout_s)

    def note_inserted(self, shard: int, head: int) -> None:
        """The shard's actor appended: its head is now `head`."""
        self._inserted[shard] = head
        self._sample_bell.value = (head * len(self._inserted) + shard) & 0x7FFFFFFF  # another value at every ring
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
        return rule.samples_per_insert == 0.0 or self.balance - count >= -rule.room

    def wait_for_items(self, may: Callable[[], bool], timeout_s: float) -> bool:
        """Sleeps until `may` says yes, at most `timeout_s`; it is asked again whenever somebody has appended."""
        return self._wait(self._sample_bell, may, timeout_s)

    def note_sampled(self, learner: int, count: int) -> None:
        """The learner drew `count` items."""
        self.note_spent(learner, int(self._sampled[learner]) + count)

    def write_off(self, learner: int) -> None:
        """Nothing is due any longer: the items that it was due for are gone, and others must be appended first."""
        if self.balance > 0.0:
            total = int(self._written_off[learner]) + math.ceil(self.balance)
            self.note_spent(self.rule.num_learners + learner, total)

    def note_spent(self, place: int, total: int) -> None:
        """The count at `place`, those drawn by every learner before those that it wrote off, is `total` by now."""
        self._spent[place] = total
        self._insert_bell.value = (total * len(self._spent) + place) & 0x7FFFFFFF
        self._insert_bell.wake()

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

    # Between hosts.

    def counts(self) -> Array:
        """What is known here, in the order of `LimiterRule.num_counts`."""
        return self._counts.copy()

    def listen(self, learner: int | None) -> Doorbell:
        """The doorbell of this learner, or of the host's shard server (None): every append here rings it from now."""
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
        """Before anybody counts on: there must be as many shards; learners, of whom only the sums count, may change."""
        if len(state["inserted"]) != len(self._inserted):
            raise ConfigError(
                f"replay limiter: the checkpoint counts {len(state['inserted'])} shards, where this run has "
                f"{len(self._inserted)}."
            )
        others = [0] * (self.rule.num_learners - 1)
        spent = [total for name in ("sampled", "written_off") for total in (sum(state[name]), *others)]
        self._counts[:] = [*state["inserted"], *spent]
