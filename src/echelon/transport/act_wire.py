"""How an act request looks on the channel: one frame of a header, and of what the board holds for one seat.

`RemoteSeat` is a `Seat` whose arrays are private memory: `ask` sends them as one frame. `ActListener` stands beside the
server's `Batcher`: it lays the frames on the board, where they are found like any question of this host, and sends the
answers back. Who waits: a client for its answer, on its socket; a server in `ActListener.next`, on socket, gate and
doorbell at once. A repeated question is answered again from the board, never computed twice. If a client dies, nobody
waits for it after one round (`Batcher`); its successor comes with a higher incarnation, and what the old one may still
send is refused.

Arrays follow the header at offsets that the layout alone decides, so both sides read and write them in place. The
number of a question holds the life of the client in its upper bits: whatever a newer life says outdates all before.
Words of the service's own are, in a question, the seat and whether the recurrent state is wanted; in an answer, the
seat and the version of the weights.

Needs nothing heavier than numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from echelon.layout import ArrayField, place, size_of
from echelon.transport.act_board import ActLayout
from echelon.transport.channel import NUM_WORDS, Delivery, Service, digest_of

Array = np.ndarray[Any, Any]

LIFE_BITS = 40  # where the life of a client starts in its counts
MAX_LIFE = 2**22
NUMBER, SEAT, EXTRA = 4, 5, 6  # places in the header


class ActWire:
    """The services of one layout, and where the arrays lie in a question and in an answer."""

    def __init__(self, layout: ActLayout) -> None:
        K, header = layout.rows, ("words", (NUM_WORDS,), np.int64)
        self.question: tuple[ArrayField, ...] = place(
            [header, ("first", (K,), np.bool_)]
            + [(f"observation.{i}", (K, *leaf.shape), leaf.dtype) for i, leaf in enumerate(layout.observation)]
        )
        answer = [
            header,
            ("action", (K, *layout.action.shape), layout.action.dtype),
            ("log_prob", (K,), np.float32),
            ("value", (K,), np.float32),
        ]
        self.answer: tuple[ArrayField, ...] = place(
            answer + [(f"state.{i}", (K, *shape), np.float32) for i, shape in enumerate(layout.state_shapes)]
        )
        self.question_bytes = size_of(self.question)
        self.answer_bytes = size_of(place(answer))  # without the state, which comes last
        self.stateful_bytes = size_of(self.answer)
        leaves = tuple((leaf.path, leaf.shape, leaf.dtype.str) for leaf in (*layout.observation, layout.action))
        sizes = (layout.rows, layout.num_clients, layout.num_groups, layout.num_servers)
        digest = digest_of((leaves, tuple(layout.state_shapes), sizes))
        self.act = Service("act requests", Delivery.READ, digest)
        self.seat = Service("seats", Delivery.READ, digest)  # a question takes one, a post leaves it

    def answer_views(self, rows: Array) -> dict[str, Array]:
        """Every field of answers that lie in the rows of `rows`, (n, stateful_bytes); nothing is copied."""
        spans = {f.name: (f, rows[:, f.offset : f.offset + f.nbytes]) for f in self.answer}
        return {name: span.view(f.dtype).reshape(-1, *f.shape) for name, (f, span) in spans.items()}
