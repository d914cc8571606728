"""The worker registry: reports of workers that join, leave and are lost, and of refused handshakes."""

from __future__ import annotations

import time

import pytest

from echelon.roles.journal import Journal
from echelon.roles.tally import Tally
from echelon.roles.worker_registry import ACTIVE_S, NUM_REPORTED, REPORT_EVERY, HandshakeReport, WorkerRegistry


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A monotonic clock that the test advances."""
    now = [1_000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_coming_leaving_and_getting_lost_are_told_once(now: list[float]) -> None:
    journal, told = Journal(Tally(1), 0.0), list[str]()
    worker_registry = WorkerRegistry(journal, told.append)
    for name in ("a", "b"):
        journal.enter(name)
        worker_registry.seen(name, is_new=True)
    assert worker_registry.num_active == 2 and journal.leave("a")
    worker_registry.left("a")
    assert not journal.leave("a"), "it is gone"
    now[0] += ACTIVE_S + 1.0
    for _ in range(3):
        worker_registry.look()
    assert worker_registry.num_active == 0
    journal.row_of("b")
    worker_registry.seen("b")
    worker_registry.seen("b")
    assert told == [
        "worker a joined (1 active)",
        "worker b joined (2 active)",
        "worker a left (1 active)",
        f"worker b has been silent for {ACTIVE_S:.0f} s (0 active)",
        "worker b is back (1 active)",
    ]


def test_a_door_that_is_started_again_tells_nothing_twice(now: list[float]) -> None:
    journal, told = Journal(Tally(1), 0.0), list[str]()
    journal.enter("lost")
    now[0] += ACTIVE_S + 1.0
    journal.enter("here")
    worker_registry = WorkerRegistry(journal, told.append)
    worker_registry.seen("here")
    worker_registry.look()
    assert told == [] and worker_registry.num_active == 1


def test_of_many_workers_few_are_told() -> None:
    journal, told = Journal(Tally(1), 0.0), list[str]()
    worker_registry = WorkerRegistry(journal, told.append)
    for number in range(3 * REPORT_EVERY):
        journal.enter(str(number))
        worker_registry.seen(str(number), is_new=True)
    assert len(told) == NUM_REPORTED + 3 and f"every {REPORT_EVERY}th" in told[NUM_REPORTED - 1]


def test_refused_handshakes_are_told_first_and_then_every_hundredth() -> None:
    told: list[str] = []
    handshakes = HandshakeReport(told.append)
    for count in (0, 1, 2, 99, 100, 101, 350, 399, 400):
        handshakes.look(count)
    assert [text.partition("(")[2].partition(" ")[0] for text in told] == ["1", "100", "350", "400"]
    assert "ECHELON_SECRET" in told[0]
