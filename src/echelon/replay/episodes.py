"""A buffer of whole episodes; the first appended episode determines the fields.

An episode is one item, its first step and its length; the steps are stored in a side ring. So episodes of any length
share one capacity of `num_steps` steps, and the oldest episodes are evicted together with their steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from echelon.errors import ConfigError
from echelon.replay.layout import ItemField, ReplayError, ShardLayout, SideRing, row_type
from echelon.replay.reader import ShardReader
from echelon.replay.restore import read_header, restore
from echelon.replay.sampled import Keys
from echelon.replay.shard import Shard, ShardWriter
from echelon.replay.sharded import Replay
from echelon.replay.snapshot import Snapshot
from echelon.replay.sum_tree import check_priorities

Array = np.ndarray[Any, Any]
STEPS = "steps"


@dataclass(frozen=True, slots=True)
class SampledEpisodes:
    """Sampled episodes, end to end: episode i has the steps `offsets[i]` to `offsets[i + 1]` (exclusive)."""

    keys: Keys
    weights: Array  # (n,)
    offsets: Array  # (n + 1,)
    rows: Array  # (total steps,) records

    @property
    def fields(self) -> dict[str, Array]:
        """Every field (total steps, ...), as strided views of the rows."""
        return {name: self.rows[name] for name in self.rows.dtype.names or ()}

    def __getitem__(self, index: int) -> dict[str, Array]:
        where = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return {name: value[where] for name, value in self.fields.items()}

    def __len__(self) -> int:
        return len(self.offsets) - 1


def _rows(name: str, value: ArrayLike) -> Array:
    """Returns a field of an episode as an array with one row per step."""
    try:
        rows = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise ReplayError(f"episode buffer: {name} is not an array: {error}") from error
    if rows.ndim == 0:
        raise ReplayError(f"episode buffer: {name} is {value!r:.80}; it must be an array with one row per step.")
    return rows


class EpisodeBuffer:
    """A buffer of `num_steps` steps in at most `num_episodes` episodes, in the private memory of one process."""

    def __init__(
        self,
        num_steps: int,
        num_episodes: int,
        alpha: float = 0.0,
        *,
        name: str = "episode buffer",
        lower: str = "num_steps",
    ) -> None:
        """Creates an empty buffer; `lower` names the setting that an out-of-memory error tells the user to lower."""
        self.num_steps, self.num_episodes, self.alpha = num_steps, num_episodes, alpha
        self.name, self._lower = name, lower
        self._replay: Replay | None = None

    def _open(self, fields: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        """Allocates the memory for episodes with these fields."""
        number = np.dtype(np.int64)
        items = (ItemField("first", (), number, STEPS), ItemField("length", (), number))
        for name, (shape, dtype) in fields.items():
            ItemField(name, shape, dtype)  # raises ReplayError for dtypes that replay cannot hold
        layout = ShardLayout(items, self.num_episodes, (SideRing(STEPS, row_type(fields), self.num_steps),))
        shard = Shard(layout, name=self.name, lower=self._lower)
        self._fields, self._writer, self._reader = dict(fields), ShardWriter(shard), ShardReader(shard)

    def append(self, episode: Mapping[str, ArrayLike], priority: float = 1.0) -> int:
        """Appends the steps (T, ...) of an episode; returns its number."""
        fields = {name: _rows(name, value) for name, value in episode.items()}
        lengths = {len(value) for value in fields.values()}
        length = max(lengths, default=0)
        if len(lengths) != 1 or not 0 < length <= self.num_steps:
            raise ReplayError(
                f"episode buffer: the fields of an episode have {sorted(lengths)} steps; all must have the same "
                f"length, from 1 to {self.num_steps}, the capacity of the buffer."
            )
        priorities = np.array([priority], np.float64)
        check_priorities(priorities, "episode buffer")
        given = {name: (value.shape[1:], value.dtype) for name, value in fields.items()}
        if self._replay is None:
            self._open(given)
            self._replay = Replay([self._reader], self.alpha)
        if given != self._fields:
            raise ReplayError(f"episode buffer: an episode has {given}, but the first episode had {self._fields}.")
        first = np.array([self._writer.store(STEPS, fields, length)])
        number = self._writer.append({"first": first, "length": np.array([length])}, priorities)
        self._replay.advance()
        return number

    @property
    def size(self) -> int:
        """The number of episodes that can be sampled."""
        return self._replay.size if self._replay is not None else 0

    def sample(self, batch: int, beta: float, rng: np.random.Generator) -> SampledEpisodes:
        if self._replay is None:
            raise ReplayError(
                f"episode buffer: a batch of {batch} cannot be sampled before the first episode is appended."
            )
        drawn = self._replay.sample(batch, beta, rng)
        return self._whole(drawn.keys, drawn.weights, drawn.fields)

    def window(self) -> tuple[int, int]:
        """Returns the range of stored episode numbers: the first, and one past the last."""
        return self._replay.window(0) if self._replay is not None else (0, 0)

    def read(self, numbers: Array) -> SampledEpisodes:
        """Returns the episodes with these `numbers`, all of which must be stored."""
        start, stop = self.window()
        if len(numbers) == 0 or numbers.min() < start or numbers.max() >= stop:
            raise ReplayError(
                f"episode buffer: {numbers} cannot be read; the buffer holds episodes {start} to {stop - 1}."
            )
        block = self._reader.layout.block(len(numbers))
        self._reader.read(numbers, block)
        return self._whole(Keys(np.zeros_like(numbers), numbers), np.ones(len(numbers)), block.fields)

    def _whole(self, keys: Keys, weights: Array, items: Mapping[str, Array]) -> SampledEpisodes:
        """Returns the episodes of `items`, with their steps."""
        first, length = items["first"], items["length"]
        offsets = np.concatenate([[0], np.cumsum(length)])
        steps = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], length)
        return SampledEpisodes(keys, weights, offsets, self._reader.read_side(STEPS, steps))

    def clear(self) -> None:
        """Removes every episode; their numbers are not reused."""
        if self._replay is not None:
            self._writer.clear()
            self._replay.advance()

    def update(self, keys: Keys, priorities: Array) -> int:
        """Sets the priorities of sampled episodes, skipping evicted ones; returns how many were set."""
        return self._replay.update(keys, priorities) if self._replay is not None else 0

    # Checkpoints.

    def save(self, path: Path) -> None:
        """Writes the content as a snapshot."""
        if self._replay is None:
            raise ReplayError(f"episode buffer: cannot save to {path} before the first episode is appended.")
        Snapshot(path, self._replay).write()

    def load(self, path: Path) -> None:
        """Restores exactly what `save` wrote, into an empty buffer of the same size."""
        if self._replay is not None:
            raise ReplayError(f"episode buffer: cannot load {path} into a buffer that holds {self.size} episodes.")
        rings = read_header(path)["layout"]["rings"]
        if [ring[0] for ring in rings] != [STEPS]:
            raise ConfigError(f"snapshot {path} is not a snapshot of an episode buffer.")
        self._open({name: (tuple(shape), np.dtype(kind)) for name, shape, kind in rings[0][1]})
        restore(path, [self._reader])
        self._replay = Replay([self._reader], self.alpha)
