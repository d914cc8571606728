"""Collective groups in launched processes: every operation, several groups, a wrapped module, and misuse."""

from __future__ import annotations

from typing import Any

import collective_programs as programs
import pytest

from echelon.world import launch

LOOPBACK = "0100007F"  # 127.0.0.1 as /proc/net/tcp writes it

Told = list[dict[str, Any]]  # per rank: program -> its report


@pytest.fixture(scope="module")
def told() -> Told:
    return launch(programs.everything, 3)


def test_every_operation_leaves_what_it_should(told: Told) -> None:
    for rank in range(3):
        assert told[rank]["every_operation"] == {
            "size": 3,
            "ranks": [0, 1, 2],
            "all_reduce": [3.0, 30.0],
            "all_reduce max": [2.0, 10.0],
            "reduce to 1": [3.0, 30.0] if rank == 1 else None,
            "broadcast of 2": [2.0, 10.0],
            "all_gather": [[0.0, 10.0], [1.0, 10.0], [2.0, 10.0]],
            "gather to 2": [[0.0, 10.0], [1.0, 10.0], [2.0, 10.0]] if rank == 2 else None,
            "scatter of 1": [float(rank)] * 2,
            "later": [3.0, 30.0],
        }


def test_messages_come_from_anybody_or_from_whom_one_asks(told: Told) -> None:
    first, tagged, begun = told[0]["messages"]
    assert first == [(1, [1.0] * 3), (2, [2.0] * 3)]
    assert tagged == [(2, [4.0] * 3), (1, [2.0] * 3)]
    assert begun == [(1, [3.0] * 3), (2, [6.0] * 3)]


def test_groups_overlap_and_only_their_members_enter(told: Told) -> None:
    assert [one["several_groups"] for one in told] == [[3.0, 3.0], [3.0, 5.0, 3.0, 2.0], [5.0]]


def test_a_module_is_wrapped_among_some_ranks_without_the_others(told: Told) -> None:
    assert [one["averaged_gradient"] for one in told] == [None, [1.5, 1.5], [1.5, 1.5]]


def test_misuse_is_told_and_breaks_nothing(told: Told) -> None:
    assert all("misuse" in one for one in told[:2])


def test_who_gave_up_can_try_again(told: Told) -> None:
    assert "within 0.2 s" in told[0]["comes_late"]


def test_who_failed_alone_can_try_again_with_the_others(told: Told) -> None:
    assert "connecting took longer than the timeout" in told[1]["fails_alone"]


def test_nothing_listens_beyond_the_loopback(told: Told) -> None:
    for one in told[:2]:
        assert one["listening"] and set(one["listening"]) == {LOOPBACK}
