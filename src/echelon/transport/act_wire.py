"""How an act request looks on the wire: one frame of a header, and of what the board holds for one seat.

A frame starts with eight 64-bit words: what it is (`MAGIC`, the kind), the digest of the layout both sides must agree
on, the seat, the count of the question, and one more: in a question whether the recurrent state is wanted, in an answer
the version of the weights. Arrays follow at offsets that the layout alone decides, so both sides read and write them in
place. The count holds the life of the client in its upper bits: whatever a newer life says outdates all before.

Needs nothing heavier than numpy.
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum
from typing import Any

import numpy as np

from echelon.layout import Field, place, size_of
from echelon.transport.act_board import ActLayout

Array = np.ndarray[Any, Any]

MAGIC = 0x31_54_43_41_48_43_45  # "ECHACT1", little end first
NUM_WORDS = 8
HEADER = struct.Struct(f"<{NUM_WORDS}q")
LIFE_BITS = 40  # where the life of a client starts in its counts
MAX_LIFE = 2**22
MAX_REASON_BYTES = 1000


class Word(IntEnum):
    """Places in the header."""

    MAGIC, KIND, DIGEST, SEAT, COUNT, EXTRA = range(6)


class Kind(IntEnum):
    """What a frame is; clients send the first three."""

    ARRIVE, ASK, LEAVE, WELCOME, ANSWER, REFUSED = range(1, 7)


class Wire:
    """The frames of one layout: their digest, and where the arrays lie in a question and in an answer."""

    def __init__(self, layout: ActLayout) -> None:
        K, header = layout.rows, ("words", (NUM_WORDS,), np.int64)
        self.question: tuple[Field, ...] = place(
            [header, ("first", (K,), np.bool_)]
            + [(f"observation.{i}", (K, *leaf.shape), leaf.dtype) for i, leaf in enumerate(layout.observation)]
        )
        answer = [
            header,
            ("action", (K, *layout.action.shape), layout.action.dtype),
            ("log_prob", (K,), np.float32),
            ("value", (K,), np.float32),
        ]
        self.answer: tuple[Field, ...] = place(
            answer + [(f"state.{i}", (K, *shape), np.float32) for i, shape in enumerate(layout.state_shapes)]
        )
        self.question_bytes = size_of(self.question)
        self.answer_bytes = size_of(place(answer))  # without the state, which comes last
        self.stateful_bytes = size_of(self.answer)
        self.digest = _digest(layout)

    def header(self, kind: Kind, seat: int, count: int, extra: int = 0) -> Array:
        """A header by itself: the whole frame of an arrival, a leave, a welcome."""
        words = np.zeros(NUM_WORDS, np.int64)
        words[: len(Word)] = MAGIC, kind, self.digest, seat, count, extra
        return words

    def answer_views(self, rows: Array) -> dict[str, Array]:
        """Every field of answers that lie in the rows of `rows`, (n, stateful_bytes); nothing is copied."""
        spans = {f.name: (f, rows[:, f.offset : f.offset + f.nbytes]) for f in self.answer}
        return {name: span.view(f.dtype).reshape(-1, *f.shape) for name, (f, span) in spans.items()}


def _digest(layout: ActLayout) -> int:
    """Sixty-four bits that differ where layouts do."""
    leaves = [(leaf.path, leaf.shape, leaf.dtype.str) for leaf in (*layout.observation, layout.action)]
    sizes = (layout.rows, layout.num_clients, layout.num_groups, layout.num_servers)
    text = repr((leaves, layout.state_shapes, sizes))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
