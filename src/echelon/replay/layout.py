"""The memory layout of replay items: rows of named fields, and rings of rows.

An item is one *row* (a numpy record) with its fields side by side, so that reading it touches one or two cache lines
and one call gathers a whole batch. A field that is a stack of frames holds the numbers of its frames in a *side ring*,
where every frame is stored once; so many items may share a row of a side ring. Imports only numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from echelon.errors import EchelonError
from echelon.layout import aligned

Array = np.ndarray[Any, Any]
FRAME_SLACK = 1.05  # frames per item in a side ring: one, plus some for the first stack of every episode


class ReplayError(EchelonError, ValueError):
    """A call to a replay buffer was invalid; the buffer was not changed."""


class NothingLeft(ReplayError):
    """Every shard is empty, or its host is lost."""


@dataclass(frozen=True, slots=True)
class ItemField:
    """One named value of an item.

    With `ring`, the row holds numbers of rows in that side ring. With `stack` as well, the field is a stack of that
    many frames: it is appended as frame numbers (stack,) and read back as an array of `shape`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    ring: str = ""
    stack: int = 0

    def __post_init__(self) -> None:
        if self.dtype.kind not in "biufc":
            raise ReplayError(f"field {self.name} has dtype {self.dtype}; replay holds numbers and booleans only.")
        if self.stack and (not self.ring or self.shape[:1] != (self.stack,)):
            raise ReplayError(
                f"field {self.name} of shape {self.shape} is not a stack of {self.stack} over its first axis."
            )

    @property
    def in_row(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """The shape and dtype of the field in the row."""
        return ((self.stack,), np.dtype(np.int64)) if self.stack else (self.shape, self.dtype)

    def to_json(self) -> list[Any]:
        return [self.name, list(self.shape), self.dtype.str, self.ring, self.stack]


def row_type(fields: Mapping[str, tuple[tuple[int, ...], Any]]) -> np.dtype[Any]:
    """Returns the record dtype of `fields` (name: shape and dtype), each aligned as its dtype requires."""
    return np.dtype([(name, dtype, tuple(shape)) for name, (shape, dtype) in fields.items()], align=True)


@dataclass(frozen=True, slots=True)
class SideRing:
    """Rows that items refer to by number."""

    name: str
    row: np.dtype[Any]
    capacity: int

    def to_json(self) -> list[Any]:
        types = [self.row[name] for name in self.row.names or ()]
        fields = [[name, list(t.shape), t.base.str] for name, t in zip(self.row.names or (), types, strict=True)]
        return [self.name, fields, self.capacity]


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The layout of one shard: `capacity` items, the actor's words and priorities, the side rings."""

    fields: tuple[ItemField, ...]
    capacity: int
    rings: tuple[SideRing, ...] = ()
    row: np.dtype[Any] = field(init=False)

    def __post_init__(self) -> None:
        names = [f.name for f in self.fields]
        if self.capacity < 1 or not names or len(set(names)) < len(names):
            raise ReplayError(
                f"a shard of {self.capacity} items with fields {names} is invalid: it needs a capacity of 1 or more "
                "and at least one field, with unique names."
            )
        unknown = {f.ring for f in self.fields if f.ring} - {ring.name for ring in self.rings}
        if unknown:
            raise ReplayError(f"fields refer to side rings {sorted(unknown)}, which the layout does not have.")
        object.__setattr__(self, "row", row_type({f.name: f.in_row for f in self.fields}))

    @property
    def sizes(self) -> dict[str, int]:
        """The size in bytes of every part of the segment, in order."""
        num_words = 3 + len(self.rings)  # head, reserve, tail, and the rows reserved in each side ring
        sizes = {"words": 8 * num_words, "rows": self.capacity * self.row.itemsize, "initial": 8 * self.capacity}
        sizes |= {f"oldest.{ring.name}": 8 * self.capacity for ring in self.rings}
        return sizes | {f"ring.{ring.name}": ring.capacity * ring.row.itemsize for ring in self.rings}

    @property
    def nbytes(self) -> int:
        return sum(aligned(size) for size in self.sizes.values())

    def parts(self, memory: Array) -> dict[str, Array]:
        """Returns a view of every part of `memory`."""
        parts, offset = {}, 0
        for name, size in self.sizes.items():
            parts[name] = memory[offset : offset + size]
            offset += aligned(size)
        return parts

    def block(self, size: int) -> ItemBlock:
        """Returns an uninitialized block for `size` items."""
        stacks = {f.name: np.empty((size, *f.shape), f.dtype) for f in self.fields if f.stack}
        return ItemBlock(np.empty(size, self.row), stacks)

    def to_json(self) -> dict[str, Any]:
        return {
            "capacity": self.capacity,
            "fields": [f.to_json() for f in self.fields],
            "rings": [ring.to_json() for ring in self.rings],
        }


@dataclass(frozen=True, slots=True)
class ItemBlock:
    """A batch of items in private memory: rows, and stacks of frames as arrays."""

    rows: Array  # (n,) records
    stacks: dict[str, Array]  # (n, *shape)

    def part(self, where: slice) -> ItemBlock:
        return ItemBlock(self.rows[where], {name: stack[where] for name, stack in self.stacks.items()})

    @property
    def fields(self) -> dict[str, Array]:
        """Every field (n, ...); the fields in the row are strided views."""
        return {name: self.rows[name] for name in self.rows.dtype.names or ()} | self.stacks


def item_layout(
    fields: Mapping[str, tuple[tuple[int, ...], Any]],
    capacity: int,
    stacks: Mapping[str, str] | None = None,
    num_frames: int = 0,
) -> ShardLayout:
    """Returns the layout of a shard of items with `fields` (name: shape and dtype).

    `stacks` maps each field that is a stack of frames over its first axis to the side ring that stores its frames;
    `num_frames` is the capacity of a side ring (0: derived from `FRAME_SLACK`).
    """
    rings: dict[str, SideRing] = {}
    items = []
    for name, (shape, dtype) in fields.items():
        ring = (stacks or {}).get(name, "")
        items.append(ItemField(name, tuple(shape), np.dtype(dtype), ring, shape[0] if ring else 0))
        if not ring:
            continue
        room = num_frames or math.ceil(capacity * FRAME_SLACK) + 4 * shape[0]
        row = row_type({"frame": (tuple(shape[1:]), dtype)})
        if rings.setdefault(ring, SideRing(ring, row, room)).row != row:
            raise ReplayError(
                f"field {name} of shape {shape} shares ring {ring} with frames of another shape or dtype."
            )
    return ShardLayout(tuple(items), capacity, tuple(rings.values()))


def spans(start: int, stop: int, capacity: int) -> Iterator[tuple[slice, slice]]:
    """Yields, for the rows `start` to `stop` (exclusive), their slots in a ring and their positions in the range.

    There are two pieces where the range wraps around the end of the ring, otherwise one.
    """
    done = start
    while done < stop:
        slot = done % capacity
        count = min(stop - done, capacity - slot)
        yield slice(slot, slot + count), slice(done - start, done - start + count)
        done += count
