"""The loss account: means since the last call of `take`, and detection of NaN and infinite losses."""

from __future__ import annotations

import math

import pytest
import torch

from echelon.roles.loss_account import LossAccount


def test_means_are_over_all_minibatches_that_say_something() -> None:
    account = LossAccount()
    account.note(("loss.critic", "q"), torch.tensor([1.0, 5.0]))
    account.note(("loss.critic", "q", "loss.total"), torch.tensor([2.0, 7.0, -4.0]))
    account.note(("loss.critic", "q", "loss.total"), torch.tensor([6.0, 9.0, -8.0]))
    assert account.take() == {"loss.critic": 3.0, "q": 7.0, "loss.total": -6.0}
    assert account.take() == {}
    account.note(("q",), torch.tensor([2.0]))
    assert account.take() == {"q": 2.0}


def test_values_may_be_overwritten_once_they_are_noted() -> None:
    account, values = LossAccount(), torch.tensor([1.0])
    account.note(("loss.total",), values)
    values.fill_(100.0)
    account.note(("loss.total",), values)
    values.fill_(-1.0)
    assert account.take() == {"loss.total": 50.5}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_lost_is_found_and_named_once_it_is_looked_at(value: float) -> None:
    account = LossAccount()
    for number, loss in ((1, 0.5), (2, value), (3, 0.5)):
        account.note(("loss.total", "loss.critic"), torch.tensor([0.0, 1.0]))
        account.note(("loss.total", "loss.critic"), torch.tensor([0.0, loss]))
        account.close_batch(number)
        if number == 2:
            assert account.find_non_finite(keep=1) == ""
    assert account.find_non_finite(keep=1) == f"the critic loss became {value} at update 2"
    assert account.find_non_finite() == ""


def test_only_losses_have_to_be_finite() -> None:
    account = LossAccount()
    account.note(("loss", "ratio"), torch.tensor([0.0, math.inf]))
    account.close_batch(1)
    assert account.find_non_finite() == ""
