"""Sharded replay, the learner's side: samples from all shards that one learner owns.

One tree, in the learner's private memory, spans the learner's shards: shard s has the leaves from s * capacity on, one
for each of its `capacity` item positions. `advance` adds the items that the actors appended, with their initial
priorities. `draw` draws items in proportion to priority**alpha over all shards and requests them; `collect` reads them;
`sample` does both. `update` sets new priorities of sampled items. Items in this host's shared memory are read in place.
Items behind a shard server are transferred between `draw` and `collect`, so a learner that draws ahead does not wait
for them.

Sampling is stratified (Schaul et al., 2016): the sum of priorities is divided into as many equal segments as the batch
has items, and one item is drawn from each. Importance weights are (N * P)**-beta divided by the largest of the batch,
where N is the number of items and P is an item's share of the sum. Other learners may own other shards: with their
`Mass` passed in, N and P are over all shards; with `max_weight` the learners agree on the largest weight of all their
batches.

With alpha=0 sampling is uniform: priorities are ignored, and there is no tree.

Reading never waits for an actor; the limiter decides when the learner may sample. An item that is overwritten before or
while it is read is replaced by another draw. If the host of a shard is lost, its items are dropped; they are added
again if the host comes back. `lost` holds a message about each loss and each return of a shard. If the learner dies,
its successor rebuilds the tree from the priorities in each reader's column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from echelon.errors import PeerLost
from echelon.replay.layout import ItemBlock, NothingLeft, ReplayError, ShardLayout, spans
from echelon.replay.reader import PriorityColumn, Reader
from echelon.replay.sampled import Draft, Drawn, Keys, Mass, Part, Sampled, importance
from echelon.replay.sum_tree import SumTree, check_priorities

Array = np.ndarray[Any, Any]
MAX_REDRAWS = 100


class Replay:
    """The shards that one learner owns."""

    def __init__(self, readers: Sequence[Reader], alpha: float = 0.6) -> None:
        if not readers:
            raise ReplayError("a replay needs at least one shard.")
        if not 0.0 <= alpha <= 1.0:
            raise ReplayError(f"replay: alpha={alpha} must be between 0 (uniform) and 1 (proportional to priority).")
        if any(reader.layout != readers[0].layout for reader in readers):
            raise ReplayError("replay: the shards have different layouts; all actors must have the same spaces.")
        self.readers, self.alpha, self.layout = list(readers), alpha, readers[0].layout
        self.lost: list[str] = []  # messages about shards lost or back again; the caller reports and clears them
        self._capacity = self.layout.capacity
        self.is_lost = [False] * len(readers)
        # The items of shard s that can be drawn are those from `start` to `fed` (exclusive).
        self._start, self._fed = np.zeros((2, len(readers)), np.int64)
        self._tree = SumTree(self._capacity * len(readers)) if alpha > 0.0 else None
        for shard, reader in enumerate(self.readers):
            try:
                self._restore(shard, reader)
            except PeerLost as error:
                self._drop(shard, error)
        self.advance()

    # Sizes.

    @property
    def sizes(self) -> list[int]:
        """The number of items in every shard."""
        return [int(size) for size in self._fed - self._start]

    @property
    def size(self) -> int:
        return int((self._fed - self._start).sum())

    @staticmethod
    def size_of(layout: ShardLayout, num_shards: int) -> int:
        """Returns the size of a replay in bytes: its segments, and the tree of its learner."""
        segments = layout.nbytes + PriorityColumn.size(layout.capacity)
        return num_shards * segments + SumTree.size(num_shards * layout.capacity)

    @property
    def mass(self) -> Mass:
        """The mass of this learner's shards, which other learners need."""
        size = self.size
        return Mass(self._tree.total if self._tree is not None else float(size), size)

    def window(self, shard: int) -> tuple[int, int]:
        """Returns the range of item numbers of `shard` that can be drawn: the first, and one past the last."""
        return int(self._start[shard]), int(self._fed[shard])

    # Adding items to the tree.

    def _restore(self, shard: int, reader: Reader) -> None:
        """Adds the items in the reader's column: those of a previous learner, or from before the host was lost."""
        tail, _ = reader.window()
        fed = reader.column.fed
        start = min(fed, tail)
        self._start[shard], self._fed[shard] = start, fed
        if self._tree is not None:
            for slots, _ in spans(start, fed, self._capacity):
                self._set_leaves(shard, slots.start, reader.column.priorities[slots])

    def advance(self) -> int:
        """Adds the items appended since the last call; returns how many."""
        count = 0
        for shard, reader in enumerate(self.readers):
            try:
                tail, head = reader.window()
                if self.is_lost[shard]:  # its host is back
                    self._restore(shard, reader)
                    self.is_lost[shard] = False
                    self.lost.append(f"{reader.name} is back with {self.sizes[shard]} items.")
                if head != self._fed[shard] or tail != self._start[shard]:
                    count += self._catch_up(shard, reader, tail, head)
            except PeerLost as error:
                self._drop(shard, error)
        return count

    def _catch_up(self, shard: int, reader: Reader, tail: int, head: int) -> int:
        """Adds the new items of `reader`; repeats if some were overwritten meanwhile, because newer ones exist then."""
        count = 0
        for _ in range(MAX_REDRAWS):
            due = head - max(int(self._fed[shard]), tail)
            taken = self._add_new(shard, reader, tail, head)
            count += taken
            if taken >= due:
                break
            tail, head = reader.window()
        return count

    def _add_new(self, shard: int, reader: Reader, tail: int, head: int) -> int:
        fed, before = int(self._fed[shard]), int(self._start[shard])
        first = max(fed, tail)
        if self._tree is not None:
            if first < head:
                priorities = reader.initial(first, head)
                tail = max(tail, reader.window()[0])
                if tail > first:  # overwritten while they were copied: keep the rest
                    priorities, first = priorities[min(tail, head) - first :], min(tail, head)
                self._store_priorities(shard, reader, first, priorities)
            gone = max(before, head - self._capacity)  # the first item evicted because its frames were overwritten
            if gone < tail:
                for slots, _ in spans(gone, min(tail, first), self._capacity):
                    self._set_leaves(shard, slots.start, np.zeros(slots.stop - slots.start))
        self._start[shard], self._fed[shard] = min(tail, head), head
        reader.column.fed = head
        return head - first

    def _store_priorities(self, shard: int, reader: Reader, first: int, priorities: Array) -> None:
        slot, count, column = first % self._capacity, len(priorities), reader.column.priorities
        if slot + count <= self._capacity:
            column[slot : slot + count] = priorities
            self._set_leaves(shard, slot, priorities)
            return
        for slots, rows in spans(first, first + count, self._capacity):
            column[slots] = priorities[rows]
            self._set_leaves(shard, slots.start, priorities[rows])

    def _set_leaves(self, shard: int, slot: int, priorities: Array) -> None:
        assert self._tree is not None
        self._tree.set_range(shard * self._capacity + slot, priorities**self.alpha)

    def _drop(self, shard: int, error: PeerLost) -> None:
        """Drops the items of a lost shard; later draws use the other shards."""
        if self.is_lost[shard]:
            return
        self.is_lost[shard] = True
        size = int(self._fed[shard] - self._start[shard])
        self._start[shard] = self._fed[shard]
        if self._tree is not None:
            self._set_leaves(shard, 0, np.zeros(self._capacity))
        left = self.is_lost.count(False)
        self.lost.append(
            f"{self.readers[shard].name} is lost with {size} items ({error}). Training goes on with {left} shards."
        )

    # Drawing.

    def sample(
        self,
        batch: int,
        beta: float,
        rng: np.random.Generator,
        others: Mass | None = None,
        block: ItemBlock | None = None,
    ) -> Sampled:
        """Draws `batch` items and reads them."""
        return self.collect(self.draw(batch, beta, rng, others), block)

    def draw(self, batch: int, beta: float, rng: np.random.Generator, others: Mass | None = None) -> Draft:
        """Draws `batch` items and requests them; `others` is the mass of the shards of other learners."""
        mass = self.mass + (others or Mass())
        size = mass.size
        if not 0 < batch <= size:
            raise ReplayError(
                f"replay: a batch of {batch} cannot be sampled from {size} items. Wait until the limiter admits it, or "
                "lower the batch size."
            )
        if not 0.0 <= beta < math.inf:
            raise ReplayError(
                f"replay: beta={beta} must be finite, and 0 (no correction) or more; 1 is full correction."
            )
        drawn = self._draw((np.arange(batch) + rng.random(batch)) / batch)
        return Draft(drawn, self._ask(drawn), mass, beta, rng)

    def collect(self, draft: Draft, block: ItemBlock | None = None) -> Sampled:
        """Reads a draft; call it once. The items are copied into `block`, if given."""
        drawn, batch = draft.drawn, len(draft.drawn.number)
        block = self.layout.block(batch) if block is None else block
        whole = self._read(draft.reads, block)
        for _ in range(MAX_REDRAWS):
            torn = np.flatnonzero(~whole)
            if len(torn) == 0:
                break
            self.advance()
            whole[torn] = self._redraw(drawn, torn, block, draft.rng)
        else:
            raise ReplayError(
                f"replay: {len(torn)} of {batch} items were overwritten while they were read, {MAX_REDRAWS} times in a "
                f"row; a shard of {self._capacity} items is too small for the rate of its actor. Raise replay.capacity."
            )
        weights, max_weight = self._weigh(drawn.priority, draft.mass, draft.beta)
        return Sampled(Keys(drawn.shard, drawn.number), weights, max_weight, block.fields)

    def _draw(self, shares: Array) -> Drawn:
        """Returns the items at the fractions `shares` (0 to 1, ascending) of the mass."""
        sizes = self._fed - self._start
        if not sizes.any():
            raise NothingLeft(f"replay: all {len(sizes)} shards are empty or lost; nothing can be sampled.")
        if self._tree is None:
            ends = np.cumsum(sizes)
            place = np.minimum((shares * ends[-1]).astype(np.int64), ends[-1] - 1)
            shard = ends.searchsorted(place, "right")
            return Drawn(shard, self._start[shard] + place - (ends - sizes)[shard], np.ones(len(shares)))
        leaf = self._tree.find(shares * self._tree.total)
        shard, slot = np.divmod(leaf, self._capacity)
        last = self._fed[shard] - 1
        return Drawn(shard, last - (last - slot) % self._capacity, self._tree.get(leaf))

    def _redraw(self, drawn: Drawn, torn: Array, block: ItemBlock, rng: np.random.Generator) -> Array:
        """Draws and reads other items in place of the torn ones; returns True for each that is whole."""
        others, room = self._draw(np.sort(rng.random(len(torn)))), self.layout.block(len(torn))
        whole = self._read(self._ask(others), room)
        drawn.shard[torn], drawn.number[torn], drawn.priority[torn] = others.shard, others.number, others.priority
        block.rows[torn] = room.rows
        for name, stack in block.stacks.items():
            stack[torn] = room.stacks[name]
        return whole

    def _ask(self, drawn: Drawn) -> list[Part]:
        """Requests the items of every shard; each host receives one message."""
        parts = [
            Part(shard, where, self.readers[shard].ask(drawn.number[where]))
            for shard, where in self._by_shard(drawn.shard)
        ]
        for part in parts:
            self.readers[part.shard].send()
        return parts

    def _read(self, parts: list[Part], block: ItemBlock) -> Array:
        """Copies the items into `block`; returns True for each that is whole."""
        whole = np.empty(len(block.rows), np.bool_)
        for part in parts:
            try:
                whole[part.where] = part.read.into(block.part(part.where))
            except PeerLost as error:
                self._drop(part.shard, error)
                whole[part.where] = False
        return whole

    def _by_shard(self, shard: Array) -> list[tuple[int, slice]]:
        """Returns the shards in the ascending array `shard`, with the slice of each."""
        ends = shard.searchsorted(np.arange(len(self.readers)), "right").tolist()
        return [(s, slice(a, b)) for s, (a, b) in enumerate(zip([0, *ends[:-1]], ends, strict=True)) if a < b]

    def _weigh(self, priority: Array, mass: Mass, beta: float) -> tuple[Array, float]:
        if self._tree is None or beta == 0.0:
            return np.ones(len(priority)), 1.0
        return importance(priority, mass, beta)

    # Priorities.

    def update(self, keys: Keys, priorities: Array) -> int:
        """Sets the priorities of items, skipping those evicted meanwhile; returns how many were set.

        If an item occurs twice, its last priority is used.
        """
        shard, number = keys.shard, keys.number
        if not len(shard) == len(number) == len(priorities):
            raise ReplayError(f"replay: {len(priorities)} priorities for {len(number)} keys; there must be one each.")
        if len(number) == 0:
            return 0
        check_priorities(priorities, "replay")
        priorities = priorities.astype(np.float64, copy=False)  # as in the column: a rebuilt tree is identical
        if (
            shard.min() < 0
            or shard.max() >= len(self.readers)
            or number.min() < 0
            or (number >= self._fed[shard]).any()
        ):
            raise ReplayError(
                f"replay: a key is outside the {len(self.readers)} shards with {self._fed.tolist()} items appended. "
                "Pass the keys that `sample` returned. Nothing was changed."
            )
        if self._tree is None:
            return int(np.count_nonzero(number >= self._start[shard]))
        there = number >= self._start[shard]
        if not there.all():
            shard, number, priorities = shard[there], number[there], priorities[there]
        slot = number % self._capacity
        self._tree.set(shard * self._capacity + slot, priorities**self.alpha)
        if (shard[1:] < shard[:-1]).any():
            order = np.argsort(shard, kind="stable")
            shard, slot, priorities = shard[order], slot[order], priorities[order]
        for index, where in self._by_shard(shard):
            self.readers[index].column.priorities[slot[where]] = priorities[where]
        return len(number)
