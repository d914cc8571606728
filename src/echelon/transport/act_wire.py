"""The wire format of act requests on the channel: one frame with a header and the board's arrays of one seat.

`RemoteSeat` is a `Seat` whose arrays are in private memory: `ask` sends them as one frame. `ActListener` works beside
the server's `Batcher`: it writes the frames to the board, where the batcher treats them like requests of this host, and
sends the replies back. Who waits: a client waits for its reply on its socket; a server waits in `ActListener.next`, on
socket, gate and doorbell together. A repeated request is answered again from the board and never computed twice. If a
client dies, only one round waits for it (`Batcher`). Its successor has a higher incarnation, and
late messages of the old incarnation are refused.

Arrays follow the header at offsets that the layout alone determines, so both sides read and write them in place. The
upper bits of a request's number are the client's incarnation: a request of a newer incarnation supersedes all earlier
ones. The service's own header words are, in a request, the seat and whether the recurrent state is wanted; in a reply,
the seat and the version of the weights.

Imports nothing heavier than numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from echelon.layout import ArrayField, place, size_of
from echelon.transport.act_board import ActLayout
from echelon.transport.channel import NUM_WORDS, Delivery, Service, digest_of

Array = np.ndarray[Any, Any]

LIFE_BITS = 40  # the incarnation of a client is in the bits of its request numbers from here on
MAX_LIFE = 2**22
NUMBER, SEAT, EXTRA = 4, 5, 6  # indices in the header


class ActWire:
    """The services of one layout, and the offsets of the arrays in a request and in a reply."""

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
        self.answer_bytes = size_of(place(answer))  # without the recurrent state, which is last
        self.stateful_bytes = size_of(self.answer)
        leaves = tuple((leaf.path, leaf.shape, leaf.dtype.str) for leaf in (*layout.observation, layout.action))
        sizes = (layout.rows, layout.num_clients, layout.num_groups, layout.num_servers)
        digest = digest_of((leaves, tuple(layout.state_shapes), sizes))
        self.act = Service("act requests", Delivery.READ, digest)
        self.seat = Service("seats", Delivery.READ, digest)  # a request takes a seat, a post leaves it

    def answer_views(self, rows: Array) -> dict[str, Array]:
        """Returns every field of the replies in the rows of `rows`, (n, stateful_bytes), as views."""
        spans = {f.name: (f, rows[:, f.offset : f.offset + f.nbytes]) for f in self.answer}
        return {name: span.view(f.dtype).reshape(-1, *f.shape) for name, (f, span) in spans.items()}
