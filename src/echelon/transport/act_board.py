"""Act requests in shared memory: one board where actors lay observations and an inference server lays actions.

A *seat* is one group of environments of one actor: `rows` observations, asked for together. Seats are numbered group by
group (seat = group * num_clients + client), so that the same group of all clients lies side by side and the server
reads it without gathering. Servers share the clients; each serves a range of them, in every group.

Words, each with one writer: the client's `asked` counts its questions, the server's `answered` the ones it answered, so
a seat is pending where they differ. A reply is laid down before `answered` moves; the client asks again only after it
read it. The recurrent state of a seat after question n lies in buffer n % 2 and the one before it in the other, so a
server that dies in the middle of an answer leaves the state before it whole, and the client finds there what the
learner needs. `incarnation` names the life of a client: the server zeroes the state of a seat that changed hands.

Who waits: a client for its answer, on the server's `round` word; woken by `settle`. A server for questions, on its
`bell` word; rung by `ask`, only when that matters: its `sleep` word says whether it sleeps, and whether the question
that completes a round is to wake it, or any. A client looks at it after it has asked and a server looks for questions
after it has set it, with a fence between, so no question is overlooked. If a client dies, its seat stays pending or
silent and nobody waits for it (`Batcher`); if a server dies, its clients sleep until its successor answers what stands
on the board. Every client writes `bell`, each time another value: no ring is lost by one overwriting another.

Needs nothing heavier than numpy.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from echelon.errors import TransportError
from echelon.layout import ALIGNMENT, Leaf, place, size_of, views_of
from echelon.transport.futex import NUM_MASKS, Word, fence
from echelon.transport.segments import Doorbell, create_segment, open_segment

Array = np.ndarray[Any, Any]
WORDS_PER_LINE = ALIGNMENT // 8
IDLE_SLEEP_S = 0.01  # between two looks at a silent board
AWAKE, UNTIL_ASKED, UNTIL_DUE = 0, 1, 2  # a server's sleep: over by any question, or by one that completes a round


@dataclass(frozen=True, slots=True)
class ActLayout:
    """What the board holds: the leaves of an observation, of an action, of a recurrent state, per environment."""

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
        """The clients that `server` serves: a contiguous share."""
        start, stop = (self.num_clients * i // self.num_servers for i in (server, server + 1))
        return range(start, stop)

    def server_of(self, client: int) -> int:
        return next(server for server in range(self.num_servers) if client in self.clients_of(server))

    def seats_of(self, server: int, group: int) -> range:
        """The seats of one group that `server` serves: a contiguous range."""
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
    """The board as every process sees it; whoever comes first makes it."""

    def __init__(self, folder: Path, layout: ActLayout) -> None:
        self.folder, self.layout = folder, layout
        path = folder / "acting"
        fields = place(layout.plan)
        memory = open_segment(path) if path.exists() else create_segment(path, size_of(fields))
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
        self.quorum = views["quorum"][:, :, 0]  # (J, G): seats a round waits for; 0: every question rings
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
        """What a server sleeps on that also listens to sockets."""
        return Doorbell(self.folder / f"act-{server}")


class Seat:
    """One group of environments of one client: lay the observations down, ask, wait, read the actions."""

    wants_state = True  # only a remote seat can do without

    def __init__(self, board: ActBoard, client: int, group: int = 0, incarnation: int = 0) -> None:
        """Takes the seat; the process that had it before must be gone."""
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
        """Puts the question; `observation` and `first` must be in place, and the last answer read."""
        self._count += 1
        self._asked_ns[0] = time.monotonic_ns()
        self._asked[0] = self._count
        fence()
        if self._pollable[0] or self._sleep[0] == UNTIL_ASKED or (self._sleep[0] and self._completes()):
            self._ring()

    def _completes(self) -> bool:
        """Whether all that a round waits for may have asked; of two who ask in one moment, at least one sees it."""
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
        """Sleeps until the answer is there, at most `timeout_s`; whether it is."""
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
        """The version of the weights that gave the last answer."""
        return self._version[0]

    def state_before(self) -> list[Array]:
        """The recurrent state that the last answer started from."""
        return [leaf[(self._count - 1) % 2] for leaf in self._states]

    def leave(self) -> None:
        """Nobody need wait for this seat any longer."""
        self._board.incarnation[self.index] = 0
        self._ring()
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None


@dataclass(frozen=True, slots=True)
class Round:
    """Questions that are answered together."""

    seats: Array  # (n,) the pending seats, ascending
    asked: Array  # (n,) the count of each one's question
    first_ns: int  # when the earliest was put, by the monotonic clock

    @property
    def span(self) -> slice:
        """The contiguous seats from the first to the last."""
        return slice(int(self.seats[0]), int(self.seats[-1]) + 1)

    @property
    def whole(self) -> bool:
        """Whether every seat of the span asked."""
        return int(self.seats[-1]) - int(self.seats[0]) + 1 == len(self.seats)


@dataclass(frozen=True, slots=True)
class BatchRule:
    """When a server answers: once all that are expected have asked, or enough rows, or the time is up."""

    batch: bool = True  # False: every question by itself, in the order they came
    max_batch: int = 0  # rows; 0: no limit
    max_wait_us: float = 1000.0  # since the first question of the round


class _Group:
    """The seats of one group that a server serves, and their words."""

    def __init__(self, board: ActBoard, number: int, seats: range, taken: Array) -> None:
        span = slice(seats.start, seats.stop)
        self.number, self.seats = number, np.arange(seats.start, seats.stop)
        self.asked, self.asked_ns, self.taken = board.asked[span], board.asked_ns[span], taken[span]
        self.expected, self.incarnation = board.expected[span], board.incarnation[span]
        self.num_expected = 0

    def is_complete(self, places: Array) -> bool:
        """Whether everybody who is expected has asked."""
        if self.num_expected <= len(places) and self.num_expected == np.count_nonzero(self.expected[places]):
            return True
        missing = self.expected.copy()
        missing[places] = 0
        return not missing[self.incarnation > 0].any()  # those who left are not waited for


class _Pending(NamedTuple):
    """The questions of one group that are in no round yet."""

    first_ns: int
    group: _Group
    places: Array  # in the group


class Batcher:
    """The server's side of the board: gathers questions into rounds, and settles them.

    A round waits for the seats of one group (that of its oldest question) that are expected: those whose client is
    there and asked in time before. Whoever misses a round is not expected until it asks again. So a slow, stopped or
    dead client costs the others `max_wait_us` once. A question is in one round only: further rounds can be gathered
    while one is being answered.
    """

    def __init__(self, board: ActBoard, server: int, rule: BatchRule) -> None:
        self.board, self.server, self.rule = board, server, rule
        layout = board.layout
        self.groups = [layout.seats_of(server, group) for group in range(layout.num_groups)]
        self.num_missed = 0  # rounds that went without somebody who was expected
        max_seats = max(1, rule.max_batch // max(1, layout.rows)) if rule.max_batch else layout.num_seats
        self._max_seats = max_seats if rule.batch else 1
        self._max_wait_s = rule.max_wait_us * 1e-6 if rule.batch else 0.0
        self._bell, self._round = board.bells[server], board.rounds[server]
        self._sleep = board.sleep[server : server + 1].data
        self._sleep[0] = AWAKE
        self._masks = np.uint32(1) << (np.arange(layout.num_seats) % NUM_MASKS).astype(np.uint32)
        self._taken = board.answered.copy()  # of each seat, the last question that is in a round, answered or under way
        self._queue: deque[Round] = deque()  # without batches: taken, to be answered one by one
        self._groups = [_Group(board, number, seats, self._taken) for number, seats in enumerate(self.groups)]
        self.expect_all()

    def expect_all(self) -> None:
        """The next rounds wait for everybody who is there, whoever missed the last."""
        for group in self._groups:
            self._set_expected(group, (group.incarnation > 0).nonzero()[0])

    def next(self, timeout_s: float) -> Round | None:
        """The next round, waiting at most `timeout_s` for one."""
        deadline = time.monotonic() + timeout_s
        # Who sleeps no longer than a round may wait need not be woken by its first question: so at first a short nap.
        nap_s = min(self._max_wait_s or IDLE_SLEEP_S, IDLE_SLEEP_S)
        while True:
            seen = self._bell.value
            found, wait_s = self.look()
            left_s = 0.0 if found is not None else deadline - time.monotonic()
            if left_s <= 0.0:
                self._sleep[0] = AWAKE
                return found
            sleep_s = min(wait_s, left_s, nap_s)
            kind = UNTIL_DUE if sleep_s <= self._max_wait_s else UNTIL_ASKED
            if self._sleep[0] != kind:
                self._sleep[0] = kind
                fence()  # who asked before this did not ring: look again
            elif not self._bell.wait(seen, sleep_s):
                nap_s = IDLE_SLEEP_S

    def look(self) -> tuple[Round | None, float]:
        """The round that is due, or None and how long until one must be looked for again."""
        if self._queue:
            return self._queue.popleft(), 0.0
        now_ns = time.monotonic_ns()
        pending: list[_Pending] = []
        due, wait_s = [], math.inf
        for group in self._groups:
            places = (group.asked != group.taken).nonzero()[0]
            if len(places) == 0:
                continue
            entry = _Pending(int(np.minimum.reduce(group.asked_ns[places])), group, places)
            pending.append(entry)
            left_s = (entry.first_ns - now_ns) * 1e-9 + self._max_wait_s
            if left_s <= 0.0 or group.is_complete(places):
                due.append(entry)
                if self._max_wait_s:
                    self._expect(group, places)
            else:
                wait_s = min(wait_s, left_s)
        if sum(len(entry.places) for entry in pending) >= self._max_seats:
            due = pending
        return (self._gather(due), 0.0) if due else (None, wait_s)

    def _gather(self, due: Sequence[_Pending]) -> Round:
        """The questions of the groups that are due, up to the limit, the oldest first."""
        board = self.board
        seats = np.concatenate([entry.group.seats[entry.places] for entry in due])
        if self._max_seats == 1:  # all of them in their order: whoever asks meanwhile comes after them
            seats = seats[np.argsort(board.asked_ns[seats], kind="stable")]
            asked = board.asked[seats]
            self._taken[seats] = asked
            each = enumerate(board.asked_ns[seats].tolist())
            self._queue.extend(Round(seats[i : i + 1], asked[i : i + 1], asked_ns) for i, asked_ns in each)
            return self._queue.popleft()
        if len(seats) > self._max_seats:
            seats = seats[np.argsort(board.asked_ns[seats], kind="stable")][: self._max_seats]
        if len(due) > 1 or len(seats) == self._max_seats:
            seats.sort()
        asked = board.asked[seats]
        self._taken[seats] = asked
        return Round(seats, asked, min(entry.first_ns for entry in due))

    def _expect(self, group: _Group, places: Array) -> None:
        """Those who asked in time are expected next time; those who did not are not."""
        if not len(places) == len(group.seats) == group.num_expected:
            self.num_missed += int(group.num_expected > np.count_nonzero(group.expected[places]))
            self._set_expected(group, places)

    def _set_expected(self, group: _Group, places: Array) -> None:
        group.expected[:] = 0
        group.expected[places] = 1
        group.num_expected = len(places)
        count = len(places) if self._max_wait_s else 0
        self.board.quorum[self.server, group.number] = min(count, self._max_seats)

    def claim(self, round: Round) -> None:
        """Zeroes the recurrent state of seats that changed hands; before their state is read."""
        if not self.board.state:
            return
        board, seats = self.board, round.seats
        fresh = board.known_incarnation[seats] != board.incarnation[seats]
        for seat, asked in zip(seats[fresh].tolist(), round.asked[fresh].tolist(), strict=True):
            for leaf in board.state:
                leaf[(asked - 1) % 2, seat] = 0.0
            board.known_incarnation[seat] = board.incarnation[seat]

    def settle(self, round: Round, version: int) -> None:
        """Shows the replies that were laid down, and wakes those who wait for them."""
        board, seats = self.board, round.seats
        board.version[seats] = version
        board.answered[seats] = round.asked
        mask = int(np.bitwise_or.reduce(self._masks[seats]))
        self._round.value = (self._round.value + 1) & 0x7FFFFFFF
        self._round.wake(mask)
