"""The wire format of slots sent to another host; each frame of stacked images is sent once.

An observation that is a stack of the newest S frames repeats S - 1 of them in the next step. The sender compares
consecutive stacks: where a stack is its predecessor shifted by one frame, it sends only the newest frame; otherwise,
for example after a reset, it sends the whole stack. The receiver rebuilds the slot bit for bit. Imports only numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.errors import Refused
from echelon.transport.channel import Delivery, Part, Service

Array = np.ndarray[Any, Any]

SLOTS = Service("slots", Delivery.RECORD)  # own words: stream, number of its earlier slots, the sender's token
PARTS_OF_STACK = 4


@dataclass(frozen=True, slots=True)
class Stack:
    """The position and shape of stacks of frames in a slot."""

    offset: int
    rows: int  # T + 1
    envs: int
    frames: int  # S, per stack, the newest last
    frame_bytes: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.envs * self.frames * self.frame_bytes

    def of(self, slot: Array) -> Array:
        """Returns the stacks in `slot` as a view (rows, envs, frames, bytes)."""
        shape = (self.rows, self.envs, self.frames, self.frame_bytes)
        return slot[self.offset : self.offset + self.nbytes].reshape(shape)


@dataclass(frozen=True, slots=True)
class SlotBytes:
    """The layout of a slot as raw bytes for another host; in a `SlotRing`, the slot is one field."""

    nbytes: int
    stacks: tuple[Stack, ...] = ()

    def views(self, memory: Array) -> dict[str, Array]:
        return {"slot": memory}

    def to_wire(self) -> list[Any]:
        return [self.nbytes, [[s.offset, s.rows, s.envs, s.frames, s.frame_bytes] for s in self.stacks]]

    @classmethod
    def from_wire(cls, value: Sequence[Any]) -> SlotBytes:
        nbytes, stacks = value
        return cls(nbytes, tuple(Stack(*stack) for stack in stacks))

    def pack(self, slot: Array) -> list[Part]:
        """Returns the message frames, to follow the header, that carry the content of `slot`."""
        parts = [np.concatenate(self._beside(slot)) if self.stacks else slot]
        for stack in self.stacks:
            rows = stack.of(slot)
            moved = _moved_on(rows)
            parts += [np.packbits(moved), rows[0], rows[1:, :, -1][moved], rows[1:][~moved]]
        return [part.reshape(-1).view(np.uint8).data for part in parts]

    def unpack(self, parts: Sequence[memoryview], slot: Array) -> None:
        """Writes the output of `pack` into `slot`; raises Refused if the parts do not fit the layout."""
        arrays = [np.frombuffer(part, np.uint8) for part in parts]
        if len(arrays) != 1 + PARTS_OF_STACK * len(self.stacks):
            raise Refused(f"a slot was refused: {len(arrays)} parts, not {1 + PARTS_OF_STACK * len(self.stacks)}.")
        beside = self._beside(slot)
        _require(len(arrays[0]), sum(len(piece) for piece in beside))
        at = 0
        for piece in beside:
            piece[:] = arrays[0][at : at + len(piece)]
            at += len(piece)
        for place, stack in enumerate(self.stacks):
            start = 1 + PARTS_OF_STACK * place
            _rebuild(stack, stack.of(slot), arrays[start : start + PARTS_OF_STACK])

    def _beside(self, slot: Array) -> list[Array]:
        """Returns the parts of `slot` outside the stacks."""
        pieces, at = [], 0
        for stack in self.stacks:
            pieces.append(slot[at : stack.offset])
            at = stack.offset + stack.nbytes
        return [*pieces, slot[at:]]


def _moved_on(rows: Array) -> Array:
    """Returns (rows - 1, envs): whether each stack after the first row is its predecessor shifted by one frame."""
    num_rows, envs, _, frame_bytes = rows.shape
    older, newer = rows[:-1, :, 1:], rows[1:, :, :-1]
    wide = np.uint64 if frame_bytes % 8 == 0 and rows.ctypes.data % 8 == 0 else np.uint8
    moved = np.empty((num_rows - 1, envs), np.bool_)
    for t in range(num_rows - 1):  # row by row, so that the compared bytes stay in the cache
        before = older[t].reshape(envs, -1).view(wide)
        moved[t] = (before == newer[t].reshape(envs, -1).view(wide)).all(1)
    return moved


def _rebuild(stack: Stack, rows: Array, parts: Sequence[Array]) -> None:
    bits, first, newest, whole = parts
    count = (stack.rows - 1) * stack.envs
    _require(len(bits), -(-count // 8))
    moved = np.unpackbits(bits, count=count).reshape(stack.rows - 1, stack.envs).astype(np.bool_)
    num_moved = int(moved.sum())
    _require(len(first), stack.envs * stack.frames * stack.frame_bytes)
    _require(len(newest), num_moved * stack.frame_bytes)
    _require(len(whole), (count - num_moved) * stack.frames * stack.frame_bytes)
    rows[0] = first.reshape(rows[0].shape)
    rows[1:, :, -1][moved] = newest.reshape(-1, stack.frame_bytes)
    rows[1:][~moved] = whole.reshape(-1, stack.frames, stack.frame_bytes)
    for t, which in enumerate(moved):
        if which.all():
            rows[t + 1, :, :-1] = rows[t, :, 1:]
        else:
            rows[t + 1, which, :-1] = rows[t, which, 1:]


def _require(num_bytes: int, expected: int) -> None:
    if num_bytes != expected:
        raise Refused(f"a slot was refused: a part has {num_bytes} bytes, not {expected}.")
