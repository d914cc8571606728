"""The listener of act requests: who sits on a seat, what is answered, and what a bad frame costs."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import act_peers
import numpy as np
import pytest
import torch
import zmq
from act_peers import LAYOUT, check, put

from echelon.errors import ConfigError, Refused
from echelon.layout import Leaf
from echelon.roles.acting import ActRequest
from echelon.roles.central_acting import RemoteActing
from echelon.transport.act_board import ActBoard, ActLayout, Seat
from echelon.transport.act_listener import ActListener, Bounds
from echelon.transport.act_wire import LIFE_BITS, ActWire
from echelon.transport.batcher import Batcher, BatchRule, Round
from echelon.transport.channel import HEADER, MAGIC, Kind
from echelon.transport.curve import secure_client
from echelon.transport.remote_seat import RemoteSeat, wait_any
from echelon.transport.secret import user_secret
from echelon.transport.sockets import HANDSHAKE_BYTES
from running import wait_until

PATIENCE_S = 60.0
PLACES = ActLayout(
    (Leaf("observation.near", (2,), np.dtype(np.int64)), Leaf("observation.far", (), np.dtype(np.int64))),
    Leaf("action", (), np.dtype(np.int64)),
    rows=2,
    num_clients=2,
)


class Hall:
    """A server in this very thread: its listener is served while the test waits for something."""

    def __init__(self, folder: Path, layout: ActLayout = LAYOUT, **options: Any) -> None:
        self.board = ActBoard(folder, layout)
        self.listener = ActListener(self.board, 0, "tcp://localhost:0", **options)
        self.batcher = Batcher(self.board, 0, BatchRule(max_wait_us=0.0))
        self.num_answered = 0
        self.seats: list[RemoteSeat] = []
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def seat(self, incarnation: int = 0, group: int = 0) -> RemoteSeat:
        self.seats.append(RemoteSeat(self.listener.address, LAYOUT, 0, group, incarnation))
        return self.seats[-1]

    def dealer(self) -> zmq.Socket[bytes]:
        """A raw socket that is connected to the listener."""
        self.sockets.append(self.context.socket(zmq.DEALER))
        secure_client(self.sockets[-1], user_secret())
        self.sockets[-1].connect(self.listener.address)
        return self.sockets[-1]

    def serve(self) -> None:
        round = self.listener.next(self.batcher, 0.0)
        if round is not None:
            act_peers.answer(self.batcher, round, self.listener)
            self.num_answered += len(round.seats)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def served() -> bool:
            self.serve()
            return condition()

        wait_until(served, what)

    def exchange(self, seat: RemoteSeat, number: int) -> None:
        put(seat, number)
        self.until(lambda: seat.answered, "the answer came")

    def has_all_asked(self, seats: Sequence[Seat | RemoteSeat]) -> bool:
        """Takes in what came and answers nothing."""
        self.listener.next(self.batcher, 0.0)
        return all(self.board.asked[seat.index] for seat in seats)

    def answer_only(self, seat: Seat | RemoteSeat, tells: bool = True) -> None:
        """Answers the question of `seat` that lies on the board; unless it `tells`, nothing is sent."""
        index = np.array([seat.index])
        round = Round(index, self.board.asked[index], 0)
        act_peers.answer(self.batcher, round, self.listener if tells else None)

    def close(self) -> None:
        for seat in self.seats:
            seat.leave()
        self.context.destroy(linger=0)
        self.listener.close()


def in_background(wait: Callable[[], object]) -> threading.Event:
    """Waits in a thread of its own; the event says that it woke."""
    woken = threading.Event()

    def run() -> None:
        wait()
        woken.set()

    threading.Thread(target=run, daemon=True).start()
    return woken


@pytest.fixture
def hall(shm_dir: Path) -> Iterator[Hall]:
    hall = Hall(shm_dir)
    yield hall
    hall.close()


class TestSeats:
    def test_a_successor_starts_clean_and_the_old_one_is_refused(self, hall: Hall) -> None:
        old = hall.seat()
        for number in range(3):
            hall.exchange(old, number)
            check(old, number, num_before=number)
        new = hall.seat(incarnation=1)
        hall.exchange(new, 10)
        check(new, 10, num_before=0)
        put(old, 3)
        with pytest.raises(Refused, match="seat 0 was taken by incarnation 1; its successor needs a higher one"):
            hall.until(lambda: old.answered, "the old one was refused")
        hall.exchange(new, 11)
        check(new, 11, num_before=1)
        assert hall.listener.num_refused == 1

    def test_a_successor_that_has_only_arrived_outdates_the_old_one(self, hall: Hall) -> None:
        old = hall.seat()
        hall.exchange(old, 1)
        hall.seat(incarnation=1)
        hall.until(lambda: hall.board.incarnation[0] == 2, "the new one arrived")
        put(old, 2)
        with pytest.raises(Refused, match="taken by incarnation 1"):
            hall.until(lambda: old.answered, "the old one was refused")

    def test_the_same_incarnation_twice_is_refused(self, hall: Hall) -> None:
        hall.exchange(hall.seat(), 1)
        twin = hall.seat()
        put(twin, 1)
        with pytest.raises(Refused, match="its successor needs a higher one"):
            hall.until(lambda: twin.answered, "the twin was refused")

    def test_one_of_this_host_takes_the_seat_over_and_gives_it_back(self, hall: Hall) -> None:
        hall.exchange(hall.seat(), 1)
        local = Seat(hall.board, 0, incarnation=1)
        put(local, 2)
        hall.until(lambda: local.answered, "the local one was answered")
        check(local, 2, num_before=0)
        third = hall.seat(incarnation=2)
        hall.exchange(third, 3)
        check(third, 3, num_before=0)

    def test_two_groups_of_a_client_are_under_way_at_once(self, hall: Hall) -> None:
        seats = [hall.seat(group=0), hall.seat(group=1)]
        for number in range(3):
            for seat, offset in zip(seats, (0, 100), strict=True):
                put(seat, number + offset)
            for seat, offset in zip(seats, (0, 100), strict=True):
                hall.until(lambda seat=seat: seat.answered, "the answer came")
                check(seat, number + offset, num_before=number)

    @pytest.mark.parametrize("early", [0, 1])
    def test_of_two_groups_the_one_that_is_answered_first_wakes(self, hall: Hall, early: int) -> None:
        seats = [hall.seat(group=0), hall.seat(group=1)]
        for seat in seats:
            put(seat, 5)
        wait_until(lambda: hall.has_all_asked(seats), "both questions lie there")
        assert not wait_any(seats, 0.0)
        hall.answer_only(seats[early])
        assert wait_any(seats, PATIENCE_S)
        assert [seat.answered for seat in seats] == [early == 0, early == 1]
        hall.answer_only(seats[1 - early])
        assert wait_any([seats[1 - early]], PATIENCE_S)

    def test_while_two_seats_are_waited_for_lost_answers_are_asked_for_again(self, hall: Hall) -> None:
        seats = [hall.seat(group=0), hall.seat(group=1)]
        for seat in seats:
            put(seat, 5)
        wait_until(lambda: hall.has_all_asked(seats), "both questions lie there")
        for seat in seats:
            hall.answer_only(seat, tells=False)
        woken = in_background(lambda: wait_any(seats, 10 * PATIENCE_S))
        hall.until(woken.is_set, "one of them asked again")
        hall.until(lambda: all(seat.answered for seat in seats), "both did")

    def test_an_actor_wakes_for_whichever_group_is_answered(self, hall: Hall, tmp_path: Path) -> None:
        (tmp_path / "address").write_text(hall.listener.address)
        acting = RemoteActing(LAYOUT, tmp_path / "address", 0, 0)
        leaves = [np.ones((2, 3), np.float32), np.ones(2, np.bool_)]
        question = ActRequest(leaves, np.zeros(2, np.bool_), None, torch.zeros(2))
        for group in (0, 1):  # the first asks longer
            assert acting.begin(group)
            acting.submit(group, question)
        seats = [seat for seat in acting._seats if seat is not None]
        wait_until(lambda: hall.has_all_asked(seats), "both questions lie there")

        woken = in_background(lambda: acting.wait(10 * PATIENCE_S))
        hall.answer_only(seats[1])
        assert woken.wait(PATIENCE_S), "it slept although the second group was answered"
        assert acting.collect(1) is not None
        assert acting.collect(0) is None
        hall.answer_only(seats[0])
        acting.wait(PATIENCE_S)
        assert acting.collect(0) is not None
        acting.close()

    def test_a_client_of_another_server_is_told_so(self, shm_dir: Path, hall: Hall) -> None:
        halves = dataclasses.replace(LAYOUT, num_servers=2)
        (shm_dir / "halves").mkdir()
        hall.listener.close()
        hall.board = ActBoard(shm_dir / "halves", halves)
        hall.listener, hall.batcher = (
            ActListener(hall.board, 1, "tcp://127.0.0.1:0"),
            Batcher(hall.board, 1, BatchRule()),
        )
        for client in (0, 1):  # the first is that of server 0
            hall.seats.append(RemoteSeat(hall.listener.address, halves, client))
            put(hall.seats[-1], 5)
        with pytest.raises(Refused, match="server 1 does not serve seat 0"):
            hall.until(lambda: hall.seats[0].answered, "it was refused")
        hall.until(lambda: hall.seats[1].answered, "the other one was answered")

    def test_a_seat_that_left_is_not_there(self, hall: Hall) -> None:
        seat = hall.seat()
        hall.exchange(seat, 1)
        assert hall.board.incarnation[0] == 1
        hall.seats.remove(seat)
        seat.leave()
        hall.until(lambda: hall.board.incarnation[0] == 0, "it left")

    def test_the_state_comes_only_where_it_is_wanted(self, hall: Hall) -> None:
        seat = hall.seat()
        hall.exchange(seat, 1)
        hall.exchange(seat, 2)
        seat.wants_state = False
        hall.exchange(seat, 3)
        assert seat.value.tolist() == [2.0, 2.0]
        assert seat.state_before()[0].tolist() == [[1.0], [1.0]]
        seat.wants_state = True
        hall.exchange(seat, 4)
        check(seat, 4, num_before=3)

    def test_flags_on_the_board_are_flags(self, hall: Hall) -> None:
        """A boolean that is neither 0 nor 1 would be anything to whoever computes with it."""
        seat = hall.seat()
        seat.first.view(np.uint8)[:] = (0, 250)
        hall.exchange(seat, 1)
        assert hall.board.first[0].view(np.uint8).tolist() == [0, 1]

    def test_a_question_may_be_shorter_than_the_handshake(self, shm_dir: Path) -> None:
        tiny = ActLayout((Leaf("observation", (), np.dtype(np.int8)),), Leaf("action", (), np.dtype(np.int64)))
        assert ActWire(tiny).question_bytes < 257  # the least that a client of CURVE introduces itself with
        hall = Hall(shm_dir, tiny)
        hall.seats.append(RemoteSeat(hall.listener.address, tiny, 0))
        hall.seats[0].ask()
        wait_until(lambda: hall.has_all_asked(hall.seats), "the question came")
        hall.close()

    def test_an_incarnation_out_of_range_is_refused(self, hall: Hall) -> None:
        with pytest.raises(ConfigError, match="incarnation=-1 of client 0"):
            hall.seat(incarnation=-1)

    def test_a_taken_port_is_refused(self, hall: Hall) -> None:
        with pytest.raises(ConfigError, match=r"cannot listen for remote actors at tcp://127.*Choose another address"):
            ActListener(hall.board, 0, hall.listener.address)


def question(count: int = (1 << LIFE_BITS) + 1, **words: int) -> bytes:
    """A good question for seat 0, but for the header's `words`."""
    wire = ActWire(LAYOUT)
    header = {"magic": MAGIC, "kind": Kind.ASK, "service": wire.act.digest, "layout": wire.act.layout, "number": count}
    header |= {"seat": 0, "wants_state": 1, "rest": 0} | words
    return HEADER.pack(*header.values()) + bytes(wire.question_bytes - HEADER.size)


class TestFrames:
    def test_a_repeated_question_is_answered_again_and_computed_once(self, hall: Hall) -> None:
        dealer = hall.dealer()
        for _ in range(3):
            dealer.send(question())
            hall.until(lambda: bool(dealer.poll(0)), "the answer came")
            assert HEADER.unpack_from(dealer.recv())[:2] == (MAGIC, Kind.ANSWER)
        assert hall.num_answered == 1
        dealer.send(question((1 << LIFE_BITS) + 2))
        hall.until(lambda: hall.num_answered == 2, "the next question was answered")

    def test_a_repeated_question_moves_the_answer_to_the_new_connection(self, hall: Hall) -> None:
        old, new = hall.dealer(), hall.dealer()
        old.send(question())
        hall.until(lambda: bool(old.poll(0)), "the answer came")
        new.send(question())
        hall.until(lambda: bool(new.poll(0)), "the answer came again")
        assert hall.num_answered == 1

    @pytest.mark.parametrize(
        "frames",
        [
            [b""],
            [b"GET / HTTP/1.1"],
            [b"\xff" * HEADER.size],
            [bytes(len(question()))],
            [question()[:-1]],
            [question()[: HEADER.size]],
            [question(), b""],
            [b"", question()],
            [question(layout=1)],
            [question(seat=6)],
            [question(seat=-1)],
            [question(kind=0)],
            [question(kind=Kind.ANSWER)],
            [question(service=ActWire(LAYOUT).seat.digest)],
            [question(0)],
            [question(-1)],
            [question(2**63 - 1)],
        ],
    )
    def test_a_bad_frame_costs_its_sender_the_connection(self, hall: Hall, frames: list[bytes]) -> None:
        hostile = hall.dealer()
        hostile.send_multipart(frames)
        hostile.send(question())  # too late to behave
        hall.until(lambda: hall.listener.num_refused == 1, "it was refused")
        seat = hall.seat()
        hall.exchange(seat, 1)
        check(seat, 1, num_before=0)
        assert hall.num_answered == 1
        assert hall.listener.num_refused == 1

    def test_a_frame_longer_than_any_question_ends_the_connection(self, hall: Hall) -> None:
        hostile = hall.dealer()
        events = hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        hostile.send(question() + bytes(HANDSHAKE_BYTES))
        hall.until(lambda: bool(events.poll(0)), "libzmq hung up")
        hall.exchange(hall.seat(), 1)
        assert hall.num_answered == 1

    def test_another_layout_is_told_so(self, hall: Hall) -> None:
        hostile = hall.dealer()
        hostile.send(question(layout=1))
        hall.until(lambda: bool(hostile.poll(0)), "it was told")
        frame = hostile.recv()
        assert HEADER.unpack_from(frame)[1] == Kind.REFUSED
        assert b"another layout of act requests" in frame


class TestChoices:
    """Observations that no network can look up."""

    @pytest.fixture
    def hall(self, shm_dir: Path) -> Iterator[Hall]:
        choices = (Bounds(0, np.array([0, 5]), np.array([2, 9])), Bounds(1, -1, 1))
        hall = Hall(shm_dir, PLACES, choices=choices)
        yield hall
        hall.close()

    def answer(self, hall: Hall) -> None:
        """Echoes what lies on the board."""
        round = hall.listener.next(hall.batcher, 0.0)
        if round is not None:
            hall.board.action[round.seats] = hall.board.observation[1][round.seats]
            hall.batcher.settle(round, 1)
            hall.listener.reply(round)

    def is_answered(self, hall: Hall, seat: RemoteSeat) -> bool:
        self.answer(hall)
        return seat.answered

    def seat(self, hall: Hall, client: int) -> RemoteSeat:
        hall.seats.append(RemoteSeat(hall.listener.address, PLACES, client))
        hall.seats[-1].observation[0][...] = (2, 5)
        return hall.seats[-1]

    @pytest.mark.parametrize(
        ("leaf", "values", "said"),
        [
            (1, [0, 10**6], "observation.far holds 1000000,"),
            (1, [-2, 0], "observation.far holds -2,"),
            (0, [[2, 9], [3, 5]], "observation.near holds 3,"),
            (0, [[0, 4], [0, 5]], "observation.near holds 4,"),
        ],
    )
    def test_one_out_of_bounds_is_refused_and_not_laid_down(
        self, hall: Hall, leaf: int, values: list[Any], said: str
    ) -> None:
        stray, good = self.seat(hall, 0), self.seat(hall, 1)
        stray.observation[leaf][...] = values
        stray.ask()
        with pytest.raises(Refused, match=said):
            wait_until(lambda: self.is_answered(hall, stray), "it was refused")
        assert hall.listener.num_refused == 1
        assert hall.board.asked[0] == 0 and not any(leaf[0].any() for leaf in hall.board.observation)
        for value in (-1, 1):
            good.observation[1][...] = value
            good.ask()
            wait_until(lambda: self.is_answered(hall, good), "the other one was answered")
            assert good.action.tolist() == [value, value]
        assert hall.listener.num_refused == 1
