"""Act requests in shared memory: one board where actors write observations and inference servers write actions.

A *seat* is one group of environments of one actor: `rows` observations that make up one request. Seats are numbered
group by group (seat = group * num_clients + client), so the seats of one group are contiguous over all clients and the
server reads them without gathering. The clients are divided among the servers; each server serves a contiguous range of
clients, in every group.

Shared words, each with one writer: the client's `asked` counts its requests and the server's `answered` counts its
replies, so a seat is pending where the two differ. The server writes a reply before it moves `answered`; the client
sends its next request only after it has read the reply. The recurrent state of a seat after request n is stored in
buffer n % 2 and the state before request n in the other buffer. So a server that dies while it writes a reply leaves
the earlier state intact, and the client reads the initial state for the learner from there. `incarnation` identifies
the client process: the server zeroes the recurrent state of a seat whose incarnation changed.

Who waits: a client waits for its reply on the server's `round` word and is woken by `settle`. A server waits for
requests on its `bell` word and is woken by `ask`, but only when needed: its `sleep` word records whether it sleeps, and
whether any request wakes it or only the request that completes a round. A client reads `sleep` after it has moved
`asked`, and a server looks for requests after it has set `sleep`, each with a fence in between, so no request is
missed. If a client dies, its seat stays pending or idle and no round waits for it (see `Batcher`). If a server dies,
its clients sleep until its successor answers the requests on the board. All clients write `bell`, each write with a
different value, so no wake-up is lost when one client overwrites another's.

Imports nothing heavier than numpy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from echelon.errors import TransportError
from echelon.layout import ALIGNMENT, Leaf, place, size_of, views_of
from echelon.transport.futex import NUM_MASKS, Word, fence
from echelon.transport.segments import join_segment
from echelon.transport.shared_memory import Doorbell

Array = np.ndarray[Any, Any]
WORDS_PER_LINE = ALIGNMENT // 8
AWAKE, UNTIL_ASKED, UNTIL_DUE = 0, 1, 2  # a server sleeps until any request, or until one that completes a round


@dataclass(frozen=True, slots=True)
class ActLayout:
    """The layout of the board: the leaves of an observation, an action and a recurrent state, per environment."""

    observation: tuple[Leaf, ...]
    action: Leaf
    state_shapes: tuple[tuple[int, ...], ...] = ()
    rows: int = 1  # environments per seat
    num_clients: int = 1
    num_groups: int = 1  # seats per client
    num_servers: int = 1

    @property
    def num_seats(self) -> int:
        return self.num_clients * self.num_groups

    def clients_of(self, server: int) -> range:
        """Returns the clients that `server` serves: a contiguous range."""
        start, stop = (self.num_clients * i // self.num_servers for i in (server, server + 1))
        return range(start, stop)

    def server_of(self, client: int) -> int:
        return next(server for server in range(self.num_servers) if client in self.clients_of(server))

    def seats_of(self, server: int, group: int) -> range:
        """Returns the seats of one group that `server` serves: a contiguous range."""
        clients = self.clients_of(server)
        return range(group * self.num_clients + clients.start, group * self.num_clients + clients.stop)

    @property
    def plan(self) -> list[tuple[str, tuple[int, ...], Any]]:
        S, K, J = self.num_seats, self.rows, self.num_servers
        plan: list[tuple[str, tuple[int, ...], Any]] = [
            ("client_words", (S, WORDS_PER_LINE), np.int64),
            ("server_words", (S, WORDS_PER_LINE), np.int64),
            ("bells", (J, 2 * WORDS_PER_LINE), np.int32),
            ("rounds", (J, 2 * WORDS_PER_LINE), np.int32),
            ("quorum", (J, self.num_groups, WORDS_PER_LINE), np.int64),
            ("pollable", (J, WORDS_PER_LINE), np.int64),
        ]
        plan += [(leaf.path, (S, K, *leaf.shape), leaf.dtype) for leaf in self.observation]
        plan += [
            ("first", (S, K), np.bool_),
            ("action", (S, K, *self.action.shape), self.action.dtype),
            ("log_prob", (S, K), np.float32),
            ("value", (S, K), np.float32),
        ]
        return plan + [(f"state.{i}", (2, S, K, *shape), np.float32) for i, shape in enumerate(self.state_shapes)]

    @property
    def nbytes(self) -> int:
        return size_of(place(self.plan))


class ActBoard:
    """The board, mapped by every process that uses it; the first process creates it."""

    def __init__(self, folder: Path, layout: ActLayout) -> None:
        self.folder, self.layout = folder, layout
        path = folder / "acting"
        fields = place(layout.plan)
        memory = join_segment(path, size_of(fields))
        if memory.nbytes != size_of(fields):
            raise TransportError(f"segment {path} has {memory.nbytes} bytes where {size_of(fields)} are expected")
        self.memory = memory
        views = views_of(fields, memory)
        # Written by the client of a seat.
        self.asked, self.asked_ns, self.incarnation = (views["client_words"][:, i] for i in range(3))
        # Written by its server.
        self.answered, self.version, self.known_incarnation, self.expected = (
            views["server_words"][:, i] for i in range(4)
        )
        self.quorum = views["quorum"][:, :, 0]  # (J, G): seats a round waits for; 0: every request rings
        self.pollable = views["pollable"][:, 0]  # (J,): 1 where the server sleeps on its doorbell, not on its bell
        self.sleep = views["pollable"][:, 1]  # (J,): how the server sleeps on its bell
        self.bells = [Word(views["bells"][j, :1]) for j in range(layout.num_servers)]
        self.rounds = [Word(views["rounds"][j, :1]) for j in range(layout.num_servers)]
        self.observation = [views[leaf.path] for leaf in layout.observation]  # (S, K, ...)
        self.first, self.action, self.log_prob, self.value = (
            views[name] for name in ("first", "action", "log_prob", "value")
        )
        self.state = [views[f"state.{i}"] for i in range(len(layout.state_shapes))]  # (2, S, K, ...)

    def doorbell(self, server: int) -> Doorbell:
        """Returns the doorbell for a server that sleeps on sockets as well as on the board."""
        return Doorbell(self.folder / f"act-{server}")


class Seat:
    """One group of environments of one client: write the observations, call `ask`, `wait`, then read the actions."""

    wants_state = True  # only a remote seat can turn it off

    def __init__(self, board: ActBoard, client: int, group: int = 0, incarnation: int = 0) -> None:
        """Takes over the seat; the process that used it before must have ended."""
        layout = board.layout
        self.index = seat = group * layout.num_clients + client
        server = layout.server_of(client)
        peers = layout.seats_of(server, group)
        self.observation = [leaf[seat] for leaf in board.observation]
        self.first, self.action = board.first[seat], board.action[seat]
        self.log_prob, self.value = board.log_prob[seat], board.value[seat]
        self._states = [leaf[:, seat] for leaf in board.state]
        # Single words as memoryviews: plain integers are faster than numpy's.
        self._asked, self._asked_ns, self._answered, self._version = (
            words[seat : seat + 1].data for words in (board.asked, board.asked_ns, board.answered, board.version)
        )
        self._quorum = board.quorum[server, group : group + 1].data
        self._sleep, self._pollable = (words[server : server + 1].data for words in (board.sleep, board.pollable))
        self._peers_asked = board.asked[peers.start : peers.stop]
        self._peers_answered = board.answered[peers.start : peers.stop]
        self._server = server
        self._bell, self._round = board.bells[server], board.rounds[server]
        self._board = board
        self._mask = 1 << seat % NUM_MASKS
        self._count = int(board.asked[seat])
        self._doorbell: Doorbell | None = None
        board.incarnation[seat] = incarnation + 1

    def ask(self) -> None:
        """Submits a request; `observation` and `first` must be written, and the previous reply must have been read."""
        self._count += 1
        self._asked_ns[0] = time.monotonic_ns()
        self._asked[0] = self._count
        fence()
        if self._pollable[0] or self._sleep[0] == UNTIL_ASKED or (self._sleep[0] and self._completes()):
            self._ring()

    def _completes(self) -> bool:
        """Returns whether this request may complete a round; of two simultaneous requests, at least one sees True."""
        return bool(np.count_nonzero(self._peers_asked != self._peers_answered) >= self._quorum[0])

    def _ring(self) -> None:
        self._bell.value = (self._count * self._board.layout.num_seats + self.index) & 0x7FFFFFFF
        if self._pollable[0]:
            self._doorbell = self._doorbell or self._board.doorbell(self._server)
            self._doorbell.ring()
        else:
            self._bell.wake()

    @property
    def answered(self) -> bool:
        return self._answered[0] == self._count

    def wait(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for the reply; returns whether it has arrived."""
        deadline = time.monotonic() + timeout_s
        while True:
            seen = self._round.value
            if self._answered[0] == self._count:
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0.0:
                return False
            self._round.wait(seen, left_s, self._mask)

    @property
    def version(self) -> int:
        """The version of the weights that computed the last reply."""
        return self._version[0]

    def state_before(self) -> list[Array]:
        """Returns the recurrent state that the last reply was computed from."""
        return [leaf[(self._count - 1) % 2] for leaf in self._states]

    def leave(self) -> None:
        """Leaves the seat: rounds no longer wait for it."""
        self._board.incarnation[self.index] = 0
        self._ring()
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None
