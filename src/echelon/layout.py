"""The layout of arrays in shared memory: named fields, each aligned to cache lines. Imports only numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
ALIGNMENT = 64  # bytes: a cache line, so that no two fields share one


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a tree: its path, its shape without leading dimensions, and its dtype."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class ArrayField:
    """A named array inside a slot."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def place(plan: Iterable[tuple[str, tuple[int, ...], Any]]) -> tuple[ArrayField, ...]:
    """Lays out fields, given as (name, shape, dtype), one after the other."""
    fields: list[ArrayField] = []
    offset = 0
    for name, shape, dtype in plan:
        fields.append(ArrayField(name, shape, np.dtype(dtype), offset))
        offset += aligned(fields[-1].nbytes)
    return tuple(fields)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def size_of(fields: tuple[ArrayField, ...]) -> int:
    """Returns the total size of `fields` in bytes."""
    return fields[-1].offset + aligned(fields[-1].nbytes) if fields else 0


def views_of(fields: Iterable[ArrayField], memory: memoryview | Array) -> dict[str, Array]:
    """Returns every field as an array view of `memory`; nothing is copied."""
    raw = np.frombuffer(memory, np.uint8)
    return {f.name: raw[f.offset : f.offset + f.nbytes].view(f.dtype).reshape(f.shape) for f in fields}
