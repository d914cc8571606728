"""The memory of a line: its shared words, its ring of records, and the format of a message in the ring or in a block.

A record is two words, its kind and its number of bytes, followed by these bytes. A message is stored as one *body*: the
number of frames, the length of each frame, and the frames, each aligned for arrays of any dtype.
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
PIECE_BYTES = 3 << 14  # the maximum payload of one record: any two records fit into half of the ring
PAD = 16  # alignment of frames and records
LARGE_FRAME_BYTES = 1 << 15  # frames above this are copied with the GIL released

SKIP, MESSAGE, BLOCK, BEGIN, MIDDLE, END = range(1, 7)  # kinds of records; the last three are pieces of one body
HEAD, SLEEPS, CLOSED, COMING = range(4)  # words of each side; HEAD of the reader is its `tail`
RECORD = struct.Struct("<qq")  # kind, bytes that follow
_COUNT = struct.Struct("<q")
_WORDS_BYTES = 4 * ALIGNMENT
LINE_BYTES = _WORDS_BYTES + RING_BYTES


class Ring:
    """The segment of a line, as mapped by either side."""

    def __init__(self, memory: Array, name: str) -> None:
        if memory.nbytes != LINE_BYTES:
            raise Refused(f"line {name} was refused: it has {memory.nbytes} bytes, not {LINE_BYTES}.")
        words = memory[:_WORDS_BYTES].reshape(4, ALIGNMENT)
        # Memoryviews: plain integers are faster than numpy's.
        self.writer, self.reader = (words[i].view(np.int64).data for i in range(2))
        self.bell, self.room = (Word(words[i, :4].view(np.int32)) for i in (2, 3))
        self.records = memory[_WORDS_BYTES:].data


def padded(nbytes: int) -> int:
    return (nbytes + PAD - 1) & -PAD


@functools.lru_cache(maxsize=64)
def _table(num_frames: int) -> struct.Struct:
    """Returns the format of a body's table: the number of frames and the length of each."""
    return struct.Struct(f"<{num_frames + 1}q")


def body_bytes(lengths: list[int]) -> int:
    """Returns the bytes of a body whose frames have these lengths."""
    return padded(8 * len(lengths) + 8) + sum([(length + PAD - 1) & -PAD for length in lengths])


def write_body(target: memoryview, at: int, frames: Sequence[Buffer], lengths: list[int]) -> None:
    """Writes the body of a message into `target` at offset `at`."""
    _table(len(lengths)).pack_into(target, at, len(lengths), *lengths)
    at += padded(8 * len(lengths) + 8)
    for frame, length in zip(frames, lengths, strict=True):
        if length > LARGE_FRAME_BYTES:
            np.copyto(np.frombuffer(target[at : at + length], np.uint8), np.frombuffer(frame, np.uint8))
        else:
            target[at : at + length] = frame
        at += (length + PAD - 1) & -PAD


def frames_of(body: memoryview, name: str) -> list[memoryview]:
    """Returns the frames of a message as views of `body`; raises Refused if line `name` carried something else."""
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
