"""The board of act requests: seats, rounds, the batch rule, and what remains when a client or a server dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import TransportError
from echelon.layout import Leaf
from echelon.transport.act_board import AWAKE, UNTIL_ASKED, UNTIL_DUE, ActBoard, ActLayout, Seat
from echelon.transport.batcher import Batcher, BatchRule, Round
from echelon.transport.futex import Word
from echelon.transport.segments import create_segment
from running import TESTS, wait_until

Array = np.ndarray[Any, Any]
LONG_US = 60e6  # no test waits this long


def layout(num_clients: int = 3, **changes: Any) -> ActLayout:
    observation = (Leaf("observation", (2,), np.dtype(np.float32)),)
    return ActLayout(observation, Leaf("action", (), np.dtype(np.int64)), num_clients=num_clients, **changes)


@pytest.fixture
def board(shm_dir: Path) -> ActBoard:
    return ActBoard(shm_dir, layout(rows=2))


def take_seats(board: ActBoard) -> list[Seat]:
    shape = board.layout
    return [Seat(board, client, group) for group in range(shape.num_groups) for client in range(shape.num_clients)]


def answer(batcher: Batcher, round: Round, version: int = 1) -> None:
    """The sum of every observation, as an integer."""
    board = batcher.board
    batcher.claim(round)
    board.action[round.seats] = board.observation[0][round.seats].sum(-1).astype(np.int64)
    batcher.settle(round, version)


def ask(seat: Seat, number: float) -> None:
    seat.observation[0][...] = number
    seat.ask()


class TestWord:
    def test_a_sleeper_wakes_when_the_word_was_changed_before_it_slept(self, shm_dir: Path) -> None:
        word = Word(create_segment(shm_dir / "word", 64)[:4].view(np.int32))
        word.value = 7
        assert word.wait(6, 60.0)

    def test_a_wait_ends_with_its_time(self, shm_dir: Path) -> None:
        word = Word(create_segment(shm_dir / "word", 64)[:4].view(np.int32))
        assert not word.wait(0, 0.01)

    def test_a_wake_reaches_only_masks_that_it_meets(self, shm_dir: Path) -> None:
        memory = create_segment(shm_dir / "word", 64)
        woken: list[int] = []

        def sleep(mask: int) -> None:
            if Word(memory[:4].view(np.int32)).wait(0, 60.0, mask):
                woken.append(mask)

        threads = [threading.Thread(target=sleep, args=(1 << bit,)) for bit in range(3)]
        for thread in threads:
            thread.start()
        word = Word(memory[:4].view(np.int32))
        wait_until(lambda: word.wake(0b010) == 1, "the second sleeper slept")
        threads[1].join(60.0)
        assert woken == [0b010]
        wait_until(lambda: (word.wake(), len(woken))[1] == 3, "everybody woke")
        for thread in threads:
            thread.join(60.0)


class TestRounds:
    def test_a_round_is_due_when_everybody_asked_and_its_answers_reach_their_seats(self, board: ActBoard) -> None:
        seats = take_seats(board)
        batcher = Batcher(board, 0, BatchRule(max_wait_us=LONG_US))
        ask(seats[0], 1), ask(seats[2], 3)
        assert batcher.next(0.0) is None
        ask(seats[1], 2)
        round = batcher.next(0.0)
        assert round is not None and round.seats.tolist() == [0, 1, 2] and round.whole and round.span == slice(0, 3)
        assert not any(seat.answered for seat in seats)
        answer(batcher, round, version=5)
        for number, seat in enumerate(seats, 1):
            assert seat.wait(0.0) and seat.action.tolist() == [2 * number] * 2 and seat.version == 5

    def test_somebody_who_missed_a_round_is_not_waited_for_until_it_asks_again(self, board: ActBoard) -> None:
        seats = take_seats(board)
        batcher = Batcher(board, 0, BatchRule(max_wait_us=1000))
        ask(seats[0], 1), ask(seats[1], 1)
        late = batcher.next(60.0)
        assert late is not None and late.seats.tolist() == [0, 1]
        assert time.monotonic_ns() - late.first_ns >= 1_000_000 and batcher.num_missed == 1
        answer(batcher, late)
        batcher._max_wait_s = LONG_US * 1e-6  # from here on a wait would make the test time out
        ask(seats[0], 1), ask(seats[1], 1)
        round = batcher.next(0.0)
        assert round is not None and round.seats.tolist() == [0, 1] and batcher.num_missed == 1
        answer(batcher, round)
        ask(seats[2], 1)  # it is back: this round does not wait for it yet
        ask(seats[0], 1), ask(seats[1], 1)
        round = batcher.next(0.0)
        assert round is not None and round.seats.tolist() == [0, 1, 2]
        answer(batcher, round)
        ask(seats[0], 1), ask(seats[1], 1)
        assert batcher.look()[0] is None  # the third is expected again

    def test_who_left_is_not_waited_for(self, board: ActBoard) -> None:
        seats = take_seats(board)
        batcher = Batcher(board, 0, BatchRule(max_wait_us=LONG_US))
        seats[1].leave()
        ask(seats[0], 1), ask(seats[2], 1)
        round = batcher.next(0.0)
        assert round is not None and round.seats.tolist() == [0, 2] and not round.whole

    def test_without_batches_every_question_is_answered_alone_in_its_order(self, board: ActBoard) -> None:
        seats = take_seats(board)
        batcher = Batcher(board, 0, BatchRule(batch=False))
        for index in (2, 0, 1):
            ask(seats[index], index)
        order = []
        while (round := batcher.next(0.0)) is not None:
            order += round.seats.tolist()
            answer(batcher, round)
        assert order == [2, 0, 1]

    def test_a_round_holds_at_most_max_batch_rows_and_the_oldest_come_first(self, board: ActBoard) -> None:
        seats = take_seats(board)
        batcher = Batcher(board, 0, BatchRule(max_batch=4, max_wait_us=LONG_US))
        for index in (2, 1, 0):
            ask(seats[index], index)
        first = batcher.next(0.0)
        assert first is not None and first.seats.tolist() == [1, 2]
        answer(batcher, first)
        ask(seats[1], 1)
        second = batcher.next(0.0)
        assert second is not None and second.seats.tolist() == [0, 1]

    def test_groups_are_answered_apart_so_that_one_steps_while_the_other_asks(self, shm_dir: Path) -> None:
        board = ActBoard(shm_dir, layout(2, num_groups=2))
        seats = take_seats(board)
        batcher = Batcher(board, 0, BatchRule(max_wait_us=LONG_US))
        ask(seats[2], 1), ask(seats[0], 1), ask(seats[3], 1)  # both of group 1, one of group 0
        round = batcher.next(0.0)
        assert round is not None and round.seats.tolist() == [2, 3]
        answer(batcher, round)
        ask(seats[1], 1)
        round = batcher.next(0.0)
        assert round is not None and round.seats.tolist() == [0, 1]

    def test_servers_share_the_clients(self, shm_dir: Path) -> None:
        shape = layout(5, num_groups=2, num_servers=2)
        assert [list(shape.clients_of(server)) for server in range(2)] == [[0, 1], [2, 3, 4]]
        assert [list(shape.seats_of(1, group)) for group in range(2)] == [[2, 3, 4], [7, 8, 9]]
        board = ActBoard(shm_dir, shape)
        seats = take_seats(board)
        batchers = [Batcher(board, server, BatchRule(max_wait_us=LONG_US)) for server in range(2)]
        for client in range(5):
            ask(seats[client], client)
        rounds = [batcher.next(0.0) for batcher in batchers]
        assert [round.seats.tolist() for round in rounds if round] == [[0, 1], [2, 3, 4]]

    def test_everybody_can_be_expected_again(self, board: ActBoard) -> None:
        seats = take_seats(board)
        batcher = Batcher(board, 0, BatchRule(max_wait_us=1000))
        ask(seats[0], 1)
        round = batcher.next(60.0)
        assert round is not None and round.seats.tolist() == [0]  # the others missed it
        answer(batcher, round)
        batcher._max_wait_s = LONG_US * 1e-6
        batcher.expect_all()
        ask(seats[0], 1), ask(seats[1], 1)
        assert batcher.look()[0] is None
        ask(seats[2], 1)
        round = batcher.next(0.0)
        assert round is not None and round.seats.tolist() == [0, 1, 2]

    @pytest.mark.parametrize(
        ("sleep", "rings"), [(AWAKE, [False] * 3), (UNTIL_ASKED, [True] * 3), (UNTIL_DUE, [False, False, True])]
    )
    def test_a_server_is_rung_only_when_it_must_wake(self, sleep: int, rings: list[bool], board: ActBoard) -> None:
        seats = take_seats(board)
        Batcher(board, 0, BatchRule(max_wait_us=LONG_US))
        board.sleep[0] = sleep
        heard = []
        for seat in seats:
            before = board.bells[0].value
            ask(seat, 1)
            heard.append(board.bells[0].value != before)
        assert heard == rings

    def test_a_board_of_another_layout_is_refused(self, shm_dir: Path) -> None:
        ActBoard(shm_dir, layout(3))
        with pytest.raises(TransportError, match="bytes where"):
            ActBoard(shm_dir, layout(30))


class TestState:
    """The recurrent state counts the requests of a seat, so that a lost or repeated request shows."""

    def serve(self, batcher: Batcher, *, settle: bool = True) -> None:
        board = batcher.board
        round = batcher.next(0.0)
        assert round is not None
        batcher.claim(round)
        for seat, asked in zip(round.seats.tolist(), round.asked.tolist(), strict=True):
            board.state[0][asked % 2, seat] = board.state[0][(asked - 1) % 2, seat] + 1
        if settle:
            batcher.settle(round, 1)

    @pytest.fixture
    def board(self, shm_dir: Path) -> ActBoard:
        return ActBoard(shm_dir, layout(1, state_shapes=((1,),)))

    def test_the_state_before_an_answer_is_there_with_it(self, board: ActBoard) -> None:
        seat, batcher = Seat(board, 0), Batcher(board, 0, BatchRule())
        for count in range(5):
            seat.ask()
            self.serve(batcher)
            assert seat.wait(0.0) and seat.state_before()[0].item() == count

    def test_a_server_that_died_in_the_middle_of_an_answer_is_followed_by_one_that_answers_it_once(
        self, board: ActBoard
    ) -> None:
        seat, batcher = Seat(board, 0), Batcher(board, 0, BatchRule())
        for count in range(5):
            seat.ask()
            self.serve(batcher, settle=False)  # the state was written, the reply never published
            batcher = Batcher(board, 0, BatchRule())
            self.serve(batcher)
            assert seat.wait(0.0) and seat.state_before()[0].item() == count

    def test_a_new_life_of_a_client_starts_from_a_clean_state(self, board: ActBoard) -> None:
        batcher = Batcher(board, 0, BatchRule())
        for pending in (False, True):  # the predecessor died with its request answered, and with it pending
            seat = Seat(board, 0, incarnation=2 * pending)
            for _ in range(3):
                seat.ask()
                self.serve(batcher)
            if pending:
                seat.ask()
            successor = Seat(board, 0, incarnation=2 * pending + 1)
            assert not pending or not successor.answered
            successor.ask()
            self.serve(batcher)
            assert successor.answered and successor.state_before()[0].item() == 0


class Actions:
    """The operations of clients and the server, in any order."""

    def __init__(self, folder: Path, num_clients: int, rule: BatchRule) -> None:
        self.board = ActBoard(folder, layout(num_clients))
        self.seats = [Seat(self.board, client) for client in range(num_clients)]
        self.lives = [0] * num_clients
        self.batcher = Batcher(self.board, 0, rule)
        self.open: dict[int, float] = {}
        self.number = 0

    def act(self, what: str, client: int) -> None:
        if what == "serve":
            round, _ = self.batcher.look()
            if round is not None:
                answer(self.batcher, round)
        elif what == "die":
            self.lives[client] += 1
            self.seats[client] = Seat(self.board, client, incarnation=self.lives[client])
            self.open.pop(client, None)
        elif client in self.open:
            if self.seats[client].wait(0.0):
                assert self.seats[client].action.item() == 2 * self.open.pop(client)
        else:
            self.number += 1
            self.open[client] = self.number
            ask(self.seats[client], self.number)


@settings(max_examples=150, deadline=None)
@given(
    moves=st.lists(st.tuples(st.sampled_from(("serve", "serve", "ask", "ask", "ask", "die")), st.integers(0, 3))),
    rule=st.sampled_from((BatchRule(max_wait_us=0), BatchRule(batch=False), BatchRule(max_batch=2, max_wait_us=1))),
)
def test_every_answer_is_to_the_question_asked(
    moves: list[tuple[str, int]], rule: BatchRule, tmp_path_factory: pytest.TempPathFactory
) -> None:
    world = Actions(tmp_path_factory.mktemp("board"), 4, rule)
    for what, client in moves:
        world.act(what, client)
    for client in list(world.open):  # nothing is lost: every pending request is answered in the end
        while client in world.open:
            world.act("serve", 0)
            world.act("ask", client)


CLIENT = """
import sys, time
from pathlib import Path
import numpy as np
from echelon.layout import Leaf
from echelon.transport.act_board import ActBoard, ActLayout, Seat
leaf = Leaf("observation", (2,), np.dtype(np.float32))
layout = ActLayout((leaf,), Leaf("action", (), np.dtype(np.int64)), num_clients=3)
seat = Seat(ActBoard(Path(sys.argv[1]), layout), int(sys.argv[2]))
assert "torch" not in sys.modules
for number in range(int(sys.argv[3])):
    seat.observation[0][...] = number
    seat.ask()
    while not seat.wait(1.0):
        pass
    assert seat.action.item() == 2 * number, (seat.action.item(), number)
    if number == 50:
        print("half", flush=True)
seat.leave()
"""


def start_client(folder: Path, client: int, questions: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CLIENT, str(folder), str(client), str(questions)]
    return subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True)


def test_processes_are_answered_while_one_is_stopped_and_one_is_killed(shm_dir: Path) -> None:
    board = ActBoard(shm_dir, layout(3))
    batcher = Batcher(board, 0, BatchRule(max_wait_us=LONG_US))  # clients run in lock-step: none finishes early
    clients = [start_client(shm_dir, 0, 400), start_client(shm_dir, 1, 1 << 30), start_client(shm_dir, 2, 1 << 30)]
    try:
        wait_until(lambda: bool((board.asked > 0).all()), "everybody asked")
        answered, hit = np.zeros(3, np.int64), False
        deadline = time.monotonic() + 60.0
        while clients[0].poll() is None:
            assert time.monotonic() < deadline
            round = batcher.next(0.05)
            if round is None:
                continue
            answer(batcher, round)
            answered[round.seats] += 1
            if not hit and answered.min() > 50:
                os.kill(clients[1].pid, signal.SIGSTOP)
                clients[2].kill()
                clients[2].wait()
                batcher._max_wait_s = 0.002
                hit = True
        assert hit and clients[0].returncode == 0 and answered[0] == 400
    finally:
        for client in clients:
            client.kill()
            client.wait()
            assert client.stdout is not None
            client.stdout.close()
