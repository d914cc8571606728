"""The journal: every message of every worker counts exactly once, wherever the gateway is killed."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.roles.journal import NUM_KEPT, NUM_ROWS, Entry, Evaluation, Journal
from echelon.roles.tally import UNKNOWN, Tally


def open_journal(evaluation: float = 0.0) -> tuple[Journal, Tally]:
    tally = Tally(1)
    tally.open(0, 0)
    return Journal(tally, evaluation), tally


def take(journal: Journal, row: int, number: int, *, evaluation: bool = False) -> bool:
    """Takes one complete episode of 10 steps. Returns whether an evaluation follows."""
    journal.begin(Entry(row, number, number, 10, (1.5, 10), Evaluation("w", number) if evaluation else None))
    journal.finish()
    return journal.evaluates(row)


@pytest.mark.parametrize("part", [0.0, 0.08, 0.25, 0.29, 0.5, 0.9])
def test_the_part_of_evaluations_is_exact(part: float) -> None:
    journal, tally = open_journal(part)
    rows, evaluates, told = [journal.enter(f"worker {i}") for i in range(4)], dict.fromkeys(range(4), False), 0
    for number in range(1, 1001):
        worker = number % 4
        told += evaluates[worker]
        evaluates[worker] = take(journal, rows[worker], number, evaluation=evaluates[worker])
        ordered = told + sum(evaluates.values())
        assert ordered == int(part * number + 1e-9), "after every single episode"
    assert journal.totals()["evaluations"] == told and journal.totals()["episodes"] == 1000
    assert tally.episodes == 1000 - told and tally.env_steps == 10 * (1000 - told)
    assert journal.totals()["interactions"] == 10_000


def test_pieces_count_their_steps_and_only_the_last_ends_an_episode() -> None:
    journal, tally = open_journal(0.5)
    row = journal.enter("w")
    for number in (1, 2):
        journal.begin(Entry(row, number, 0, 7))
        journal.finish()
        assert not journal.evaluates(row)
    journal.begin(Entry(row, 3, 0, 6, (4.0, 20)))
    journal.finish()
    assert (tally.env_steps, tally.episodes, journal.last(row)) == (20, 1, 3)
    assert tally.ended(0, 0).tolist() == [[4.0, 20.0, UNKNOWN]]


@pytest.mark.parametrize("appended", [False, True])
def test_a_successor_finishes_what_was_appended_and_forgets_what_was_not(appended: bool) -> None:
    tally, memory = Tally(1), np.zeros(Journal.size(), np.uint8)
    journal = Journal(tally, 0.0, memory)
    row = journal.enter("w")
    take(journal, row, 1)
    journal.begin(Entry(row, 2, 30, 10, (2.0, 10)))  # killed here, before or after the append
    successor = Journal(tally, 0.0, memory)
    successor.recover(30 if appended else 20)
    found = successor.row_of("w")
    assert found == row and successor.last(row) == (2 if appended else 1)
    assert tally.counts_of(0) == ((20, 2) if appended else (10, 1))
    successor.recover(30)
    assert tally.counts_of(0) == ((20, 2) if appended else (10, 1)), "once"


def test_killed_while_finishing_counts_once() -> None:
    tally, memory = Tally(1), np.zeros(Journal.size(), np.uint8)
    journal = Journal(tally, 0.0, memory)
    row = journal.enter("w")
    journal.begin(Entry(row, 1, 5, 10, (2.0, 10)))
    tally.settle(0, (10, 1), (2.0, 10))  # the first step of `finish`
    Journal(tally, 0.0, memory).recover(5)
    assert tally.counts_of(0) == (10, 1) and journal.last(row) == 1 and journal.totals()["interactions"] == 10


@pytest.mark.parametrize("finished", [False, True])
def test_a_successor_knows_the_newest_evaluations(finished: bool) -> None:
    tally, memory = Tally(1), np.zeros(Journal.size(), np.uint8)
    journal = Journal(tally, 0.0, memory)
    row = journal.enter("w")
    assert journal.evaluations(0) == []
    take(journal, row, 1)
    for number in (2, 3):
        take(journal, row, number, evaluation=True)
    name = "\N{SNOWMAN}" * 64
    journal.begin(Entry(row, 4, 3, 12, (-2.5, 12), Evaluation(name, 7)))
    if finished:
        journal.finish()
    successor = Journal(tally, 0.0, memory)
    successor.recover(3)
    found = successor.evaluations(0)
    assert found[:2] == [(n, {"worker": "w", "version": n + 1, "value": 1.5, "length": 10}) for n in (1, 2)]
    assert found[2:] == successor.evaluations(2) == [(3, {"worker": name, "version": 7, "value": -2.5, "length": 12})]
    for number in range(5, 5 + NUM_KEPT):
        take(successor, row, number, evaluation=True)
    assert [number for number, _ in successor.evaluations(0)] == list(range(4, 4 + NUM_KEPT))
    assert successor.evaluations(3 + NUM_KEPT) == [] and successor.evaluations(2 + NUM_KEPT)[0][1]["version"] == 260


def test_of_too_many_workers_the_most_silent_makes_room() -> None:
    journal, _ = open_journal()
    rows = [journal.enter(f"worker {i}") for i in range(NUM_ROWS)]
    assert sorted(rows) == list(range(NUM_ROWS)) and len(journal.sockets(60.0)) == NUM_ROWS
    assert journal.row_of("worker 0") == rows[0]  # sends a message again
    assert journal.enter("one more") == rows[1]
    assert journal.row_of("worker 1") is None and journal.row_of("worker 0") == rows[0]
    assert journal.enter("one more") == rows[1] and journal.last(rows[1]) == 0
