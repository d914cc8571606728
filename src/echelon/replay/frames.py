"""Stacked observations, with each frame stored once.

Shapes: K environments, S frames per stack.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from echelon.replay.layout import ReplayError
from echelon.replay.shard import ShardWriter

Array = np.ndarray[Any, Any]


class FrameWriter:
    """Stores the stacked observations of K environments, step by step, in a side ring of their actor's shard.

    An observation that continues its predecessor (its first S - 1 frames are the predecessor's last S - 1) adds one new
    frame. Any other observation, for example after a reset, adds those of its frames that differ from the frame before
    them in the stack. The frames are compared, so nothing depends on what the environment reports. An item then holds
    the numbers of its frames.
    """

    def __init__(self, writer: ShardWriter, ring: str, num_envs: int) -> None:
        shapes = {(f.shape, f.dtype) for f in writer.layout.fields if f.ring == ring and f.stack}
        if len(shapes) != 1:
            raise ReplayError(f"{writer.shard.name}: ring {ring} needs stacks of one shape; it has {len(shapes)}.")
        ((self._shape, self._dtype),) = shapes
        self._writer, self._ring = writer, ring
        self._previous = np.zeros((num_envs, *self._shape), self._dtype)
        self._numbers = np.full((num_envs, self._shape[0]), -1, np.int64)

    def store(self, stacks: Array) -> Array:
        """Stores one observation (K, S, ...) of every environment; returns the frame numbers (K, S)."""
        if stacks.shape != self._previous.shape or stacks.dtype != self._dtype:
            raise ReplayError(
                f"{self._writer.shard.name}: stacks are {stacks.shape} of {stacks.dtype}, expected "
                f"{self._previous.shape} of {self._dtype}."
            )
        frames, previous = self._bytes(stacks), self._bytes(self._previous)
        follows = (self._numbers[:, 0] >= 0) & (frames[:, :-1] == previous[:, 1:]).all((1, 2))
        shared = self._numbers[follows, 1 - self._shape[0]]  # the oldest frame that each stack would share
        if len(shared) and not self._writer.is_kept(self._ring, int(shared.min()), self._numbers.size):
            follows[:] = False
        is_new = np.zeros(self._numbers.shape, np.bool_)
        is_new[:, -1] = True
        others = np.flatnonzero(~follows)
        if len(others):
            is_new[others, 0] = True
            is_new[others, 1:] = (frames[others, 1:] != frames[others, :-1]).any(2)
        start = self._writer.store(self._ring, {"frame": stacks[is_new]}, int(np.count_nonzero(is_new)))
        numbers = start - 1 + np.cumsum(is_new).reshape(is_new.shape)
        numbers[follows, :-1] = self._numbers[follows, 1:]
        np.copyto(self._previous, stacks)
        self._numbers = numbers
        return numbers

    def _bytes(self, stacks: Array) -> Array:
        """Returns (K, S, words): frames are compared as bits, so that a NaN equals itself."""
        flat = np.ascontiguousarray(stacks).reshape(*self._numbers.shape, -1).view(np.uint8)
        return flat.view(np.uint64) if flat.shape[2] % 8 == 0 else flat
