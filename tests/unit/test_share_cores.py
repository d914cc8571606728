"""The number of torch threads in a process that shares its host with other members of its world."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from echelon import control_groups
from echelon.world import membership
from echelon.world.membership import share_cores

FIVE = 5  # no machine has this many by default


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(FIVE)
    monkeypatch.setattr(membership, "USUAL_THREADS", FIVE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(control_groups, "groups", lambda controller: ())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("ranks", "threads"), [(1, FIVE), (2, 4), (3, 2), (20, 1)])
def test_ranks_of_a_host_share_its_cores(ranks: int, threads: int) -> None:
    share_cores(ranks)
    assert torch.get_num_threads() == threads


def test_who_has_set_a_number_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(3)
    share_cores(2)
    assert torch.get_num_threads() == 3
    torch.set_num_threads(FIVE)
    monkeypatch.setenv("OMP_NUM_THREADS", str(FIVE))
    share_cores(2)
    assert torch.get_num_threads() == FIVE
