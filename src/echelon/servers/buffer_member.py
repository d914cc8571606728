"""One member's part of a distributed buffer: a shard of transitions in its own memory, and their sum tree.

The member's main thread appends while threads that serve other members draw; a lock, held only while items are copied,
serializes them. Items are numbered in order of arrival: item n is in slot n % capacity, and n // capacity is the slot's
*version*. A priority for a slot that was overwritten meanwhile is recognized by its version and skipped.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from echelon.replay.episodes import EpisodeBuffer
from echelon.replay.layout import ItemBlock, ReplayError, item_layout
from echelon.replay.reader import ShardReader
from echelon.replay.sampled import Keys
from echelon.replay.shard import Shard, ShardWriter
from echelon.replay.sharded import Replay
from echelon.servers.buffer_items import RowFormat, Transition, flatten, flatten_episode, flatten_packed

Array = np.ndarray[Any, Any]
Answer = dict[str, Any]  # "mass" (sum of priorities, items); of a batch also "number", "form", "rows" and more
SIZE = "buffer_size={} (replay_size of a frame)"  # what to lower if the memory does not suffice

UNIQUE, RANDOM, ALL, PRIORITY = "random_unique", "random", "all", "priority"


class BufferMember(Protocol):
    """The services that the members of a buffer offer each other; every reply contains the mass."""

    capacity: int

    def look(self) -> Answer:
        """Returns the mass."""
        ...

    def draw(self, count: int, method: str, seed: int) -> Answer:
        """Draws `count` items, or all if there are fewer."""
        ...

    def clear(self) -> Answer:
        """Removes all items."""
        ...


def choose(start: int, stop: int, count: int, method: str, rng: np.random.Generator) -> Array:
    """Draws numbers from `start` to `stop - 1`, uniformly."""
    size = stop - start
    if method == ALL:
        return np.arange(start, stop)
    if size == 0:
        return np.zeros(0, np.int64)
    if method == RANDOM:
        return start + rng.integers(size, size=count)
    return start + rng.choice(size, min(count, size), replace=False)


class TransitionMember:
    """A member that stores single transitions; with `alpha` above 0 they can be drawn by priority."""

    def __init__(self, name: str, capacity: int, alpha: float = 0.0) -> None:
        self.name, self.capacity, self.alpha = name, capacity, alpha
        self.highest = 1.0  # the highest priority since it was empty: the default of new transitions
        self._lock = threading.Lock()
        self._writer: ShardWriter | None = None

    def _open(self, fields: Mapping[str, Array]) -> ShardWriter:
        """Allocates the memory for transitions with these fields."""
        layout = item_layout({name: (value.shape[1:], value.dtype) for name, value in fields.items()}, self.capacity)
        self._form = RowFormat.of(fields)
        shard = Shard(layout, name=self.name, lower=SIZE.format(self.capacity))
        self._reader, self._writer = ShardReader(shard), ShardWriter(shard)
        self._replay = Replay([self._reader], self.alpha)
        return self._writer

    def append(self, transitions: Sequence[Transition], priorities: Sequence[float] | None = None) -> None:
        """Stores all transitions, or none if one has a wrong format; the default priority is the highest so far."""
        fields = flatten(transitions[0]) if len(transitions) == 1 else flatten_episode(transitions)
        with self._lock:
            writer = self._writer or self._open(fields)
            given = (
                np.full(len(transitions), self.highest) if priorities is None else np.asarray(priorities, np.float64)
            )
            if len(given) > self.capacity:
                fields, given = {name: rows[-self.capacity :] for name, rows in fields.items()}, given[-self.capacity :]
            writer.append(fields, given)
            self.highest = max(self.highest, float(given.max()))

    def _advance(self) -> Replay | None:
        """Returns the replay, updated with the latest appends; None before the first transition."""
        if self._writer is None:
            return None
        self._replay.advance()
        return self._replay

    def _answer(self, replay: Replay | None) -> Answer:
        mass = (replay.mass.total, replay.mass.size) if replay is not None else (0.0, 0)
        return {"mass": mass}

    def look(self) -> Answer:
        with self._lock:
            return self._answer(self._advance())

    def draw(self, count: int, method: str, seed: int) -> Answer:
        rng = np.random.Generator(np.random.PCG64(seed))
        with self._lock:
            replay = self._advance()
            answer = self._answer(replay)
            if replay is None or replay.size == 0:
                return answer
            if method == PRIORITY:
                block = replay.layout.block(count)
                answer |= self._draw_by_priority(replay, block, rng)
            else:
                numbers = choose(*replay.window(0), count, method, rng)
                block = replay.layout.block(len(numbers))
                whole = self._reader.read(numbers, block)
                assert whole.all(), "an item was overwritten under the lock"
                answer["number"] = numbers
            return answer | {"form": self._form.spec, "rows": self._form.pack(block.rows)}

    def _draw_by_priority(self, replay: Replay, block: ItemBlock, rng: np.random.Generator) -> Answer:
        """Fills `block`; returns each item's share of this member's mass, and the capacity, which decodes its number.

        The batch may have more items than this member, if their mass is large: then it is drawn in several parts.
        """
        count, drawn = len(block.rows), []
        for begin in range(0, count, replay.size):
            part = block.part(slice(begin, begin + replay.size))
            draft = replay.draw(len(part.rows), 0.0, rng)
            replay.collect(draft, part)
            drawn.append(draft.drawn)
        chance = np.concatenate([part.priority for part in drawn]) / replay.mass.total
        return {
            "number": np.concatenate([part.number for part in drawn]),
            "chance": chance,
            "capacity": self.capacity,
        }

    def update(self, index: Array, version: Array, priorities: Array) -> Answer:
        """Sets the priorities of the items that are still in the slots `index`; returns how many were skipped."""
        with self._lock:
            replay = self._advance()
            if replay is None:
                raise ReplayError(
                    f"{self.name}: priorities for {len(index)} items were refused: it never had any items."
                )
            if len(index) and not (index.min() >= 0 and index.max() < self.capacity):
                raise ReplayError(f"{self.name}: priorities for slots outside 0 to {self.capacity - 1} were refused.")
            number = version.astype(np.int64) * self.capacity + index
            count = replay.update(Keys(np.zeros(len(number), np.int64), number), priorities)
            counted = priorities[number >= replay.window(0)[0]]
            self.highest = max(self.highest, float(counted.max(initial=0.0)))
            return self._answer(replay) | {"passed_over": len(number) - count}

    def clear(self) -> Answer:
        with self._lock:
            if self._writer is not None:
                self._writer.clear()
            self.highest = 1.0
            return self._answer(self._advance())


class EpisodeMember:
    """A member that stores whole episodes."""

    def __init__(self, name: str, capacity: int, num_steps: int) -> None:
        self.name, self.capacity = name, capacity
        self._lock = threading.Lock()
        lower = f"num_steps={num_steps} or {SIZE.format(capacity)}"
        self._episodes = EpisodeBuffer(num_steps, capacity, name=name, lower=lower)
        self._form: RowFormat | None = None

    def append(self, episode: Transition | Sequence[Transition]) -> None:
        fields = flatten_packed(episode) if isinstance(episode, Mapping) else flatten_episode(episode)
        with self._lock:
            self._episodes.append(fields)
            self._form = self._form or RowFormat.of(fields)

    def _answer(self) -> Answer:
        size = self._episodes.size
        return {"mass": (float(size), size)}

    def look(self) -> Answer:
        with self._lock:
            return self._answer()

    def draw(self, count: int, method: str, seed: int) -> Answer:
        rng = np.random.Generator(np.random.PCG64(seed))
        with self._lock:
            numbers = choose(*self._episodes.window(), count, method, rng)
            if len(numbers) == 0 or self._form is None:
                return self._answer()
            drawn = self._episodes.read(numbers)
            batch = {"number": numbers, "length": np.diff(drawn.offsets)}
            return self._answer() | batch | {"form": self._form.spec, "rows": self._form.pack(drawn.rows)}

    def clear(self) -> Answer:
        with self._lock:
            self._episodes.clear()
            return self._answer()
