"""The server's side of act requests over TCP: questions from other hosts are laid on the board, answers sent back.

Needs nothing heavier than numpy and pyzmq.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from echelon.errors import Refused
from echelon.transport.act_board import ActBoard
from echelon.transport.act_wire import EXTRA, LIFE_BITS, MAX_LIFE, NUMBER, SEAT, ActWire
from echelon.transport.batcher import IDLE_SLEEP_S, Batcher, Round
from echelon.transport.channel import HEADER, MAGIC, Kind, Message
from echelon.transport.channel_server import Server

BURST = 1_000  # messages taken in before the batcher gets its turn
FLAGS = bytes([0] + 255 * [1])  # by a byte, the boolean that it means


class Asker(NamedTuple):
    """Where the last question of a remote seat came from, and what it wants."""

    connection: bytes
    asked: int  # the count of that question
    wants_state: bool


class Destination(NamedTuple):
    """Where one array of a question goes."""

    row: memoryview  # the bytes of the seat on the board
    span: slice  # of the frame
    is_flag: bool  # bytes other than 0 and 1 are no booleans, whoever sent them


class Bounds(NamedTuple):
    """The values that a discrete leaf of an observation may have: low to high, both among them."""

    leaf: int  # its place in the layout's observation
    low: Any
    high: Any


class ActListener:
    """Where act requests of other hosts come in: they are laid on the board, and answered when their round is.

    One listener a server, used by that server's thread alone.
    """

    def __init__(
        self,
        board: ActBoard,
        server: int,
        address: str,
        secret: str | None = None,
        choices: Sequence[Bounds] = (),
    ) -> None:
        """Listens at `address` (tcp://HOST:PORT, port 0: any free one); off the loopback only with a secret.

        A question with an observation out of its bounds in `choices` is refused: no network can look it up.
        """
        layout = board.layout
        self.board, self.server = board, server
        self.num_lost_answers = 0
        self._wire = wire = ActWire(layout)
        self._seats = {seat for group in range(layout.num_groups) for seat in layout.seats_of(server, group)}
        self._askers: dict[int, Asker] = {}
        # Bytes and single words as memoryviews, which are faster than numpy's.
        leaves = [leaf.reshape(layout.num_seats, -1).view(np.uint8) for leaf in (board.first, *board.observation)]
        spans = [(slice(f.offset, f.offset + f.nbytes), f.dtype == np.bool_) for f in wire.question[1:]]
        self._destinations = [
            [Destination(leaf[seat].data, *span) for leaf, span in zip(leaves, spans, strict=True)]
            for seat in range(layout.num_seats)
        ]
        self._asked, self._asked_ns, self._answered, self._incarnation = (
            words.data for words in (board.asked, board.asked_ns, board.answered, board.incarnation)
        )
        self._choices = [(wire.question[2 + bounds.leaf], bounds) for bounds in choices]
        rows = np.zeros((layout.num_seats, wire.stateful_bytes), np.uint8)  # answers on their way out
        self._rows, self._row_bytes = wire.answer_views(rows), rows.reshape(-1).data
        self._rows["words"][:, :4] = MAGIC, Kind.ANSWER, wire.act.digest, wire.act.layout
        self._channel = Server("act requests", address, secret, wire.question_bytes)
        self._channel.serve(wire.act, self._take)
        self._channel.serve(wire.seat, self._take_seat)
        self.address = self._channel.address
        self._doorbell = board.doorbell(server)
        board.pollable[server] = 1

    @property
    def num_refused(self) -> int:
        """Frames and handshakes that were refused."""
        return self._channel.num_refused

    def next(self, batcher: Batcher, timeout_s: float) -> Round | None:
        """The next round by the batcher's rule, of questions from here and elsewhere, waiting at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            emptied = self._channel.take(BURST) < BURST
            found, wait_s = batcher.look()
            if found is not None:
                return found
            left_s = deadline - time.monotonic()
            if left_s <= 0.0:
                return None
            if emptied:
                # As the batcher sleeps: of two first questions of this host in one moment neither may have rung.
                self._sleep(min(wait_s, left_s, IDLE_SLEEP_S))

    def _sleep(self, timeout_s: float) -> None:
        if self._channel.sleep(timeout_s, [self._doorbell.descriptor]):
            self._doorbell.clear()

    def _take_seat(self, message: Message) -> None:
        """Somebody takes a seat, or leaves it."""
        seat = message.own[0]
        self._check(message, seat, HEADER.size)
        if message.is_post:
            self._incarnation[seat] = 0
            self._askers.pop(seat, None)
        else:
            self._incarnation[seat] = message.number >> LIFE_BITS
            self._channel.answer(message)

    def _take(self, message: Message) -> None:
        """A question."""
        seat, wants_state, _ = message.own
        self._check(message, seat, self._wire.question_bytes)
        self._check_values(message.frames[0])
        self._ask(Asker(message.connection, message.number, bool(wants_state)), seat, message.frames[0])

    def _check(self, message: Message, seat: int, nbytes: int) -> None:
        """Raises Refused at what no client of this server would say."""
        frames, number = message.frames, message.own[1] if message.is_post else message.number
        if len(frames) != 1 or len(frames[0]) != nbytes:
            raise Refused(f"{len(frames[0])} bytes in {len(frames)} frames are no act request")
        if seat not in self._seats:
            raise Refused(f"server {self.server} does not serve seat {seat}")
        life = number >> LIFE_BITS
        if not 0 < life <= MAX_LIFE:
            raise Refused(f"{life - 1} is no incarnation")
        if life < self._incarnation[seat] or number < self._asked[seat]:
            latest = max(self._incarnation[seat], self._asked[seat] >> LIFE_BITS) - 1
            raise Refused(f"seat {seat} was taken by incarnation {latest}; its successor needs a higher one")

    def _check_values(self, frame: memoryview) -> None:
        """Raises Refused at an observation that no network can look up."""
        for field, (leaf, low, high) in self._choices:
            raw = np.frombuffer(frame, np.uint8, field.nbytes, field.offset)
            values = raw.view(field.dtype).reshape(field.shape)
            stray = values[(values < low) | (values > high)]
            if stray.size:
                path = self.board.layout.observation[leaf].path
                raise Refused(f"{path} holds {stray[0]}, which its space does not")

    def _ask(self, asker: Asker, seat: int, frame: memoryview) -> None:
        """Lays a question on the board, as its client would; a repeated one is there already."""
        count = asker.asked
        self._askers[seat] = asker
        if count == self._asked[seat]:
            if count == self._answered[seat]:
                self._answer([seat], [asker])
            return
        for row, span, is_flag in self._destinations[seat]:
            row[:] = bytes(frame[span]).translate(FLAGS) if is_flag else frame[span]
        self._asked_ns[seat] = time.monotonic_ns()
        self._incarnation[seat] = count >> LIFE_BITS
        self._asked[seat] = count

    def reply(self, round: Round) -> None:
        """Sends the answers of a settled round to those of its seats that are elsewhere."""
        seats, askers = [], []
        for seat, count in zip(round.seats.tolist(), round.asked.tolist(), strict=True):
            asker = self._askers.get(seat)
            if asker is not None and asker.asked == count:
                seats.append(seat)
                askers.append(asker)
        if seats:
            self._answer(seats, askers)

    def _answer(self, seats: list[int], askers: list[Asker]) -> None:
        """Sends what stands on the board for `seats`."""
        board, rows, n = self.board, self._rows, len(seats)
        counts = [asker.asked for asker in askers]
        rows["words"][:n, SEAT] = seats
        rows["words"][:n, NUMBER] = counts
        rows["words"][:n, EXTRA] = board.version[seats]
        for name, leaf in (("action", board.action), ("log_prob", board.log_prob), ("value", board.value)):
            rows[name][:n] = leaf[seats]
        stride = self._wire.stateful_bytes
        for place, asker in enumerate(askers):
            stop = self._wire.answer_bytes
            if asker.wants_state and board.state:
                stop = stride
                for i, leaf in enumerate(board.state):
                    rows[f"state.{i}"][place] = leaf[(asker.asked - 1) % 2, seats[place]]
            if not self._channel.send(asker.connection, self._row_bytes[place * stride : place * stride + stop]):
                self.num_lost_answers += 1  # it asks again if it lives

    def close(self) -> None:
        """Hangs up; what stands on the board stays there for a successor."""
        self.board.pollable[self.server] = 0
        self._doorbell.close()
        self._channel.close()
