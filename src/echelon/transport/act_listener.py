"""The server's side of act requests over TCP: writes requests of other hosts to the board, and sends the replies.

Imports nothing heavier than numpy and pyzmq.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from echelon.errors import Refused
from echelon.transport.act_board import ActBoard
from echelon.transport.act_wire import EXTRA, LIFE_BITS, MAX_LIFE, NUMBER, SEAT, ActWire
from echelon.transport.batcher import IDLE_SLEEP_S, Batcher, Round
from echelon.transport.channel import HEADER, MAGIC, Kind, Message, print_error
from echelon.transport.channel_server import Server

BURST = 1_000  # messages received before the batcher runs
FLAGS = bytes([0] + 255 * [1])  # by a byte, the boolean that it means


class Asker(NamedTuple):
    """The client of a remote seat's last request, and what the request wants."""

    connection: bytes
    asked: int  # the number of that request
    wants_state: bool


class Destination(NamedTuple):
    """The destination of one array of a request."""

    row: memoryview  # the bytes of the seat on the board
    span: slice  # in the frame
    is_flag: bool  # booleans are normalized, because a byte other than 0 and 1 is not a valid one


class Bounds(NamedTuple):
    """The values that a discrete leaf of an observation may have: low to high, inclusive."""

    leaf: int  # its index in the layout's observation
    low: Any
    high: Any


class ActListener:
    """Receives act requests of other hosts, writes them to the board, and replies when their round is settled.

    There is one listener per server, used only by that server's thread.
    """

    def __init__(
        self,
        board: ActBoard,
        server: int,
        address: str,
        choices: Sequence[Bounds] = (),
        report: Callable[[str], None] = print_error,
    ) -> None:
        """Listens at `address` (tcp://HOST:PORT, port 0: any free one).

        Requests with an observation outside its bounds in `choices` are refused: no embedding has such an index.
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
        rows = np.zeros((layout.num_seats, wire.stateful_bytes), np.uint8)  # outgoing replies
        self._rows, self._row_bytes = wire.answer_views(rows), rows.reshape(-1).data
        self._rows["words"][:, :4] = MAGIC, Kind.ANSWER, wire.act.digest, wire.act.layout
        self._channel = Server("remote actors", address, wire.question_bytes, report=report)
        self._channel.serve(wire.act, self._take)
        self._channel.serve(wire.seat, self._take_seat)
        self.address = self._channel.address
        self._doorbell = board.doorbell(server)
        board.pollable[server] = 1

    @property
    def num_refused(self) -> int:
        """The number of frames and handshakes that were refused."""
        return self._channel.num_refused

    def next(self, batcher: Batcher, timeout_s: float) -> Round | None:
        """Waits up to `timeout_s` for the batcher's next round, of requests from this and other hosts."""
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
                # As short as the batcher's sleep: of two simultaneous first requests of this host, neither may ring.
                self._sleep(min(wait_s, left_s, IDLE_SLEEP_S))

    def _sleep(self, timeout_s: float) -> None:
        if self._channel.sleep(timeout_s, [self._doorbell.descriptor]):
            self._doorbell.clear()

    def _take_seat(self, message: Message) -> None:
        """Handles a client that takes or leaves a seat."""
        seat = message.own[0]
        self._check(message, seat, HEADER.size)
        if message.is_post:
            self._incarnation[seat] = 0
            self._askers.pop(seat, None)
        else:
            self._incarnation[seat] = message.number >> LIFE_BITS
            self._channel.answer(message)

    def _take(self, message: Message) -> None:
        """Handles an act request."""
        seat, wants_state, _ = message.own
        self._check(message, seat, self._wire.question_bytes)
        self._check_values(message.frames[0])
        self._ask(Asker(message.connection, message.number, bool(wants_state)), seat, message.frames[0])

    def _check(self, message: Message, seat: int, nbytes: int) -> None:
        """Raises Refused for a malformed message, or one of an old incarnation."""
        frames, number = message.frames, message.own[1] if message.is_post else message.number
        if len(frames) != 1 or len(frames[0]) != nbytes:
            raise Refused(f"{len(frames[0])} bytes in {len(frames)} frames are not an act request")
        if seat not in self._seats:
            raise Refused(f"server {self.server} does not serve seat {seat}")
        life = number >> LIFE_BITS
        if not 0 < life <= MAX_LIFE:
            raise Refused(f"{life - 1} is not an incarnation")
        if life < self._incarnation[seat] or number < self._asked[seat]:
            latest = max(self._incarnation[seat], self._asked[seat] >> LIFE_BITS) - 1
            raise Refused(f"seat {seat} was taken by incarnation {latest}; its successor needs a higher one")

    def _check_values(self, frame: memoryview) -> None:
        """Raises Refused for an observation outside its bounds."""
        for field, (leaf, low, high) in self._choices:
            raw = np.frombuffer(frame, np.uint8, field.nbytes, field.offset)
            values = raw.view(field.dtype).reshape(field.shape)
            stray = values[(values < low) | (values > high)]
            if stray.size:
                path = self.board.layout.observation[leaf].path
                raise Refused(f"{path} holds {stray[0]}, which is not in its space")

    def _ask(self, asker: Asker, seat: int, frame: memoryview) -> None:
        """Writes a request to the board, as a local client would; a repeated one is already there."""
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
        """Sends the replies of a settled round to its remote seats."""
        seats, askers = [], []
        for seat, count in zip(round.seats.tolist(), round.asked.tolist(), strict=True):
            asker = self._askers.get(seat)
            if asker is not None and asker.asked == count:
                seats.append(seat)
                askers.append(asker)
        if seats:
            self._answer(seats, askers)

    def _answer(self, seats: list[int], askers: list[Asker]) -> None:
        """Sends the replies on the board for `seats`."""
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
                self.num_lost_answers += 1  # it repeats its request if it is alive

    def close(self) -> None:
        """Closes the connections; requests on the board remain for a successor."""
        self.board.pollable[self.server] = 0
        self._doorbell.close()
        self._channel.close()
