"""What the user is told of workers that come, leave and are lost, and of those that are not let in."""

from __future__ import annotations

import time

import pytest

from echelon.roles.journal import Journal
from echelon.roles.tally import Tally
from echelon.roles.worker_registry import HEARD_S, NUM_REPORTED, REPORT_EVERY, HandshakeReport, WorkerRegistry


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, which the test moves."""
    now = [1_000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_coming_leaving_and_getting_lost_are_told_once(now: list[float]) -> None:
    journal, told = Journal(Tally(1), 0.0), list[str]()
    worker_registry = WorkerRegistry(journal, told.append)
    for name in ("a", "b"):
        journal.enter(name)
        worker_registry.heard(name, is_new=True)
    assert worker_registry.num_here == 2 and journal.leave("a")
    worker_registry.left("a")
    assert not journal.leave("a"), "it is gone"
    now[0] += HEARD_S + 1.0
    for _ in range(3):
        worker_registry.look()
    assert worker_registry.num_here == 0
    journal.row_of("b")
    worker_registry.heard("b")
    worker_registry.heard("b")
    assert told == [
        "worker a came (1 here)",
        "worker b came (2 here)",
        "worker a left (1 here)",
        f"worker b was not heard for {HEARD_S:.0f} s (0 here)",
        "worker b is there again (1 here)",
    ]


def test_a_door_that_is_started_again_tells_nothing_twice(now: list[float]) -> None:
    journal, told = Journal(Tally(1), 0.0), list[str]()
    journal.enter("lost")
    now[0] += HEARD_S + 1.0
    journal.enter("here")
    worker_registry = WorkerRegistry(journal, told.append)
    worker_registry.heard("here")
    worker_registry.look()
    assert told == [] and worker_registry.num_here == 1


def test_of_many_workers_few_are_told() -> None:
    journal, told = Journal(Tally(1), 0.0), list[str]()
    worker_registry = WorkerRegistry(journal, told.append)
    for number in range(3 * REPORT_EVERY):
        journal.enter(str(number))
        worker_registry.heard(str(number), is_new=True)
    assert len(told) == NUM_REPORTED + 3 and f"every {REPORT_EVERY}th" in told[NUM_REPORTED - 1]


def test_refused_handshakes_are_told_first_and_then_every_hundredth() -> None:
    told: list[str] = []
    handshakes = HandshakeReport(told.append)
    for count in (0, 1, 2, 99, 100, 101, 350, 399, 400):
        handshakes.look(count)
    assert [text.partition("(")[2].partition(" ")[0] for text in told] == ["1", "100", "350", "400"]
    assert "ECHELON_SECRET" in told[0]
