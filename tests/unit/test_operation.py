"""Waiting for an operation of a collective group: torch's result is reported, whenever it arrives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pytest

from echelon.errors import PeerLost, TransportError
from echelon.world import operation
from echelon.world.operation import CollectiveMembers, GroupHealth, Operation
from echelon.world.store import WorldStore

ROSTER = CollectiveMembers("0-1.1", (0, 1), ("a", "b"), 0, timeout_s=60.0)


class Work:
    """Torch's Work of an operation that completes during the `looks`-th wait, just after that timed out."""

    def __init__(self, looks: int, error: str = "") -> None:
        self.looks, self.error = looks, error

    def is_completed(self) -> bool:
        return self.looks <= 0

    def wait(self, timeout: timedelta | None = None) -> None:
        self.looks -= 1
        if timeout is not None and self.looks >= 0:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


def begin(work: Work, gone: str = "") -> Operation:
    reasons: Any = {gone: "it was killed"}
    health = GroupHealth(ROSTER, cast(WorldStore, None), lambda name: reasons.get(name, ""))
    return Operation(health, "reduce()", lambda: work)


@pytest.mark.parametrize("looks", [0, 1, 3])
def test_what_ends_while_nobody_looks_has_ended_well(looks: int) -> None:
    begin(Work(looks)).wait()


def test_what_fails_while_nobody_looks_has_failed_with_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "VERDICT_S", 0.0)
    with pytest.raises(TransportError, match="Connection reset by peer"):
        begin(Work(1, "Connection reset by peer")).wait()


def test_who_completed_an_operation_may_leave_before_the_others_have() -> None:
    begin(Work(3), gone="b").wait()


def test_who_is_gone_is_noticed_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "ARRIVE_S", 0.0)
    with pytest.raises(PeerLost, match=r"reduce\(\) .* cannot complete: 'b' is gone: it was killed"):
        begin(Work(1000), gone="b").wait()
