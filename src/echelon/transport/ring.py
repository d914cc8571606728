"""The memory of a line: its words, its ring of records, and how a message lies in it or in a block.

A record is two words, its kind and the bytes that follow, and those bytes. A message is laid as one *body*: how many
frames there are, how long each is, and the frames, each where arrays of every dtype lie well.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from echelon.errors import Refused
from echelon.layout import ALIGNMENT
from echelon.transport.futex import Word

Array = np.ndarray[Any, Any]
Buffer = bytes | memoryview
RING_BYTES = 1 << 18
PIECE_BYTES = 3 << 14  # what one record carries at most: any two of them fit into half of the ring
PAD = 16  # frames and records begin at multiples of it
LARGE_FRAME_BYTES = 1 << 15  # copied with the interpreter let go

SKIP, MESSAGE, BLOCK, BEGIN, MIDDLE, END = range(1, 7)  # kinds of records; the last three are pieces of one body
HEAD, SLEEPS, CLOSED, COMING = range(4)  # words of either side; the reader's first one is its tail
RECORD = struct.Struct("<qq")  # kind, bytes that follow
_COUNT = struct.Struct("<q")
_WORDS_BYTES = 4 * ALIGNMENT
LINE_BYTES = _WORDS_BYTES + RING_BYTES


class Ring:
    """The segment of a line as both sides see it."""

    def __init__(self, memory: Array, name: str) -> None:
        if memory.nbytes != LINE_BYTES:
            raise Refused(f"line {name} was refused: it has {memory.nbytes} bytes, not {LINE_BYTES}.")
        words = memory[:_WORDS_BYTES].reshape(4, ALIGNMENT)
        # Memoryviews, as plain integers are faster than numpy's.
        self.writer, self.reader = (words[i].view(np.int64).data for i in range(2))
        self.bell, self.room = (Word(words[i, :4].view(np.int32)) for i in (2, 3))
        self.records = memory[_WORDS_BYTES:].data


def padded(nbytes: int) -> int:
    return (nbytes + PAD - 1) & -PAD


@functools.lru_cache(maxsize=64)
def _table(num_frames: int) -> struct.Struct:
    """How many frames, and the length of each."""
    return struct.Struct(f"<{num_frames + 1}q")


def body_bytes(lengths: list[int]) -> int:
    """What a message takes whose frames have these lengths."""
    return padded(8 * len(lengths) + 8) + sum([(length + PAD - 1) & -PAD for length in lengths])


def lay_body(target: memoryview, at: int, frames: Sequence[Buffer], lengths: list[int]) -> None:
    """Writes a message at `at`."""
    _table(len(lengths)).pack_into(target, at, len(lengths), *lengths)
    at += padded(8 * len(lengths) + 8)
    for frame, length in zip(frames, lengths, strict=True):
        if length > LARGE_FRAME_BYTES:
            np.copyto(np.frombuffer(target[at : at + length], np.uint8), np.frombuffer(frame, np.uint8))
        else:
            target[at : at + length] = frame
        at += (length + PAD - 1) & -PAD


def frames_of(body: memoryview, name: str) -> list[memoryview]:
    """The frames of a message, as views of it; raises Refused if line `name` brought something else."""
    num_frames = _COUNT.unpack_from(body)[0] if len(body) >= 8 else -1
    if not 0 <= num_frames <= len(body) // 8 - 1:
        raise Refused(f"line {name} was refused: {num_frames} frames in a body of {len(body)} bytes.")
    lengths = _table(num_frames).unpack_from(body)[1:]
    frames, at = [], padded(8 * num_frames + 8)
    for length in lengths:
        frames.append(body[at : at + length])
        at += (length + PAD - 1) & -PAD
    if at != len(body) or (lengths and min(lengths) < 0):
        raise Refused(f"line {name} was refused: {num_frames} frames end at {at} in a body of {len(body)} bytes.")
    return frames
