"""The two sides of act requests as programs, for the tests: `python act_peers.py server|client JSON`.

A server answers with the sum of each observation as the action, and counts the questions of a seat in its recurrent
state; the count before is the value. It prints its address, serves until its input ends, and prints what it counted. A
client asks a number of questions, checks every answer, and prints the last one.
"""

from __future__ import annotations

import json
import select
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from echelon.errors import EchelonError
from echelon.layout import Leaf
from echelon.transport.act_board import ActBoard, ActLayout, Seat
from echelon.transport.act_listener import ActListener
from echelon.transport.batcher import Batcher, BatchRule, Round
from echelon.transport.remote_seat import RemoteSeat

VERSION = 7
PATIENCE_S = 60.0
LAYOUT = ActLayout(
    (Leaf("observation.place", (3,), np.dtype(np.float32)), Leaf("observation.seen", (), np.dtype(np.bool_))),
    Leaf("action", (), np.dtype(np.int64)),
    state_shapes=((1,),),
    rows=2,
    num_clients=3,
    num_groups=2,
)


def answer(batcher: Batcher, round: Round, listener: ActListener | None = None) -> None:
    """Answers a round."""
    board, seats, asked = batcher.board, round.seats, round.asked
    batcher.claim(round)
    state = board.state[0]
    before = state[(asked - 1) % 2, seats]
    state[asked % 2, seats] = before + 1.0
    board.action[seats] = board.observation[0][seats].sum(-1).astype(np.int64) * board.observation[1][seats]
    board.log_prob[seats], board.value[seats] = -1.0, before[..., 0]
    batcher.settle(round, VERSION)
    if listener is not None:
        listener.reply(round)


def put(seat: Seat | RemoteSeat, number: int) -> None:
    """Puts a question whose answer is `number` in both rows."""
    seat.observation[0][...] = (number, 1.0, -1.0)
    seat.observation[1][...] = True
    seat.ask()


def check(seat: Seat | RemoteSeat, number: int, num_before: int) -> None:
    """The answer is that to `number`, by a server that answered `num_before` questions of this seat before."""
    assert seat.action.tolist() == [number, number], (seat.action, number)
    assert seat.log_prob.tolist() == [-1.0, -1.0]
    assert seat.value.tolist() == [num_before, num_before], (seat.value, num_before)
    assert seat.version == VERSION
    assert seat.state_before()[0].tolist() == [[num_before]] * 2


def serve(
    folder: str,
    address: str = "tcp://127.0.0.1:0",
    max_wait_us: float = 60e6,
    num_present: int = 0,
    num_refused: int = 0,
) -> None:
    """Answers once `num_present` clients are there, so that its first round waits for all of them.

    Before it counts, it waits until `num_refused` are refused: those may have given up before it heard of them.
    """
    board = ActBoard(Path(folder), LAYOUT)
    listener = ActListener(board, 0, address)
    rule = BatchRule(max_wait_us=max_wait_us)
    tell(address=listener.address)
    doorman = Batcher(board, 0, rule)  # what it gathers is not answered, and so gathered again
    while np.count_nonzero(board.incarnation) < num_present:
        listener.next(doorman, 0.05)
    batcher, num_rounds = Batcher(board, 0, rule), 0
    while not any(select.select([sys.stdin], [], [], 0.0)):
        round = listener.next(batcher, 0.05)
        if round is not None:
            answer(batcher, round, listener)
            num_rounds += 1
    deadline = time.monotonic() + PATIENCE_S
    while listener.num_refused < num_refused and time.monotonic() < deadline:
        listener.next(batcher, 0.05)
    tell(
        num_refused=listener.num_refused,
        num_missed=batcher.num_missed,
        num_rounds=num_rounds,
        torch="torch" in sys.modules,
    )
    listener.close()


def ask(address: str, client: int, num_questions: int, folder: str = "", **options: Any) -> None:
    """Through the board in `folder` where one is given, through the listener at `address` otherwise."""
    try:
        seat = (
            Seat(ActBoard(Path(folder), LAYOUT), client) if folder else RemoteSeat(address, LAYOUT, client, **options)
        )
        for number in range(num_questions):
            put(seat, number)
            while not seat.wait(60.0):
                pass
            check(seat, number, num_before=number)
        seat.leave()
    except EchelonError as error:
        tell(error=type(error).__name__, text=str(error))
    else:
        tell(num_answers=num_questions, torch="torch" in sys.modules)


def tell(**words: Any) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    {"server": serve, "client": ask}[sys.argv[1]](**json.loads(sys.argv[2]))
