"""The server's side of the act board: gathers requests into rounds by a rule, and publishes their replies together.

Imports nothing heavier than numpy.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from echelon.transport.act_board import AWAKE, UNTIL_ASKED, UNTIL_DUE, ActBoard
from echelon.transport.futex import NUM_MASKS, fence

Array = np.ndarray[Any, Any]
IDLE_SLEEP_S = 0.01  # between two checks of an idle board


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that are answered in one batch."""

    seats: Array  # (n,) the pending seats, ascending
    asked: Array  # (n,) the number of each seat's request
    first_ns: int  # when the earliest was submitted, on the monotonic clock

    @property
    def span(self) -> slice:
        """The slice from the first seat to the last."""
        return slice(int(self.seats[0]), int(self.seats[-1]) + 1)

    @property
    def whole(self) -> bool:
        """Whether the round contains every seat of the span."""
        return int(self.seats[-1]) - int(self.seats[0]) + 1 == len(self.seats)


@dataclass(frozen=True, slots=True)
class BatchRule:
    """When a round is complete: all expected seats have a request, or there are enough rows, or the wait is over."""

    batch: bool = True  # False: every request by itself, in order of arrival
    max_batch: int = 0  # rows; 0: no limit
    max_wait_us: float = 1000.0  # since the first request of the round
    spin_us: float = 0.0  # how long to poll for requests, yielding the core, before sleeping


class _Group:
    """The seats of one group that a server serves, with their shared words."""

    def __init__(self, board: ActBoard, number: int, seats: range, taken: Array) -> None:
        span = slice(seats.start, seats.stop)
        self.number, self.seats = number, np.arange(seats.start, seats.stop)
        self.asked, self.asked_ns, self.taken = board.asked[span], board.asked_ns[span], taken[span]
        self.expected, self.incarnation = board.expected[span], board.incarnation[span]
        self.num_expected = 0

    def is_complete(self, places: Array) -> bool:
        """Returns whether every expected seat has a request."""
        if self.num_expected <= len(places) and self.num_expected == np.count_nonzero(self.expected[places]):
            return True
        missing = self.expected.copy()
        missing[places] = 0
        return not missing[self.incarnation > 0].any()  # clients that left are not waited for


class _Pending(NamedTuple):
    """The requests of one group that are in no round yet."""

    first_ns: int
    group: _Group
    places: Array  # indices in the group


class Batcher:
    """The server's side of the board: gathers requests into rounds, and settles them.

    A round waits for the expected seats of one group, the group of its oldest request. A seat is expected if its client
    has not left and was in time for the previous round. A seat that misses a round is not expected until its next
    request. So a stopped or dead client delays the others by `max_wait_us` once, and a slow client once per request. A
    request is in one round only: further rounds can be gathered while one is being answered.
    """

    def __init__(self, board: ActBoard, server: int, rule: BatchRule) -> None:
        self.board, self.server, self.rule = board, server, rule
        layout = board.layout
        self.groups = [layout.seats_of(server, group) for group in range(layout.num_groups)]
        self.num_missed = 0  # rounds that did not wait for an expected seat
        max_seats = max(1, rule.max_batch // max(1, layout.rows)) if rule.max_batch else layout.num_seats
        self._max_seats = max_seats if rule.batch else 1
        self._max_wait_s = rule.max_wait_us * 1e-6 if rule.batch else 0.0
        self._bell, self._round = board.bells[server], board.rounds[server]
        self._sleep = board.sleep[server : server + 1].data
        self._sleep[0] = AWAKE
        self._masks = np.uint32(1) << (np.arange(layout.num_seats) % NUM_MASKS).astype(np.uint32)
        self._taken = board.answered.copy()  # per seat: the last request in a round, answered or not
        self._queue: deque[Round] = deque()  # without batching: requests to answer one by one
        self._groups = [_Group(board, number, seats, self._taken) for number, seats in enumerate(self.groups)]
        self.expect_all()

    def expect_all(self) -> None:
        """Makes the next rounds wait for every client that has not left, even if it missed the last round."""
        for group in self._groups:
            self._set_expected(group, (group.incarnation > 0).nonzero()[0])

    def next(self, timeout_s: float) -> Round | None:
        """Waits up to `timeout_s` for the next round; returns it, or None."""
        deadline = time.monotonic() + timeout_s
        # A sleep no longer than `max_wait_us` need not end at the first request of a round, so the first one is short.
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
                fence()  # requests submitted before this did not ring: look again
            elif not self._bell.wait(seen, sleep_s):
                nap_s = IDLE_SLEEP_S

    def look(self) -> tuple[Round | None, float]:
        """Returns the round that is due, or None and the time until the next check."""
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
        """Returns a round of the due groups' requests, the oldest first, up to the limit."""
        board = self.board
        seats = np.concatenate([entry.group.seats[entry.places] for entry in due])
        if self._max_seats == 1:  # queue all in order: later requests come after them
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
        """Expects in the next round the seats that were in time for this one, and no others."""
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
        """Zeroes the recurrent state of seats with a new client. Call it before their state is read."""
        if not self.board.state:
            return
        board, seats = self.board, round.seats
        fresh = board.known_incarnation[seats] != board.incarnation[seats]
        for seat, asked in zip(seats[fresh].tolist(), round.asked[fresh].tolist(), strict=True):
            for leaf in board.state:
                leaf[(asked - 1) % 2, seat] = 0.0
            board.known_incarnation[seat] = board.incarnation[seat]

    def settle(self, round: Round, version: int) -> None:
        """Publishes the replies written to the board, and wakes the clients that wait for them."""
        board, seats = self.board, round.seats
        board.version[seats] = version
        board.answered[seats] = round.asked
        mask = int(np.bitwise_or.reduce(self._masks[seats]))
        self._round.value = (self._round.value + 1) & 0x7FFFFFFF
        self._round.wake(mask)
