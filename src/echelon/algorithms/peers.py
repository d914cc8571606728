"""Learners that learn from one batch together, as a rule sees them: its own rows, and sums over everybody's.

Every learner does what one learner with the whole batch would do, on its own rows: it draws for the whole batch from
the same generators and keeps what concerns its rows, and statistics are those of all rows. So all of them take the same
steps, and none has to tell the others its weights.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from echelon.layers import Normalizer
from echelon.objectives.policy_gradient import masked_mean, masked_normalize


class Peers(Protocol):
    """The learners of a run; `rank` is this one's place among them. All of them make the same calls in one order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def spent_s(self) -> float:
        """Seconds in calls so far, waiting for the others included."""

    def gather(self, x: Tensor) -> Tensor:
        """Everybody's `x`, stacked in the order of their ranks."""

    def add_up(self, x: Tensor) -> None:
        """Replaces `x` by the sum of everybody's."""

    def take_first(self, x: Tensor) -> None:
        """Replaces `x` by the first learner's."""


class Alone:
    """One learner has no peers."""

    rank, size, spent_s = 0, 1, 0.0

    def gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def add_up(self, x: Tensor) -> None:
        """It is the sum already."""

    def take_first(self, x: Tensor) -> None:
        """It is the first one's already."""


ALONE = Alone()


def moments(x: Tensor, valid: Tensor) -> Tensor:
    """How many entries of `x` are valid, their mean and their variance."""
    x = x.double()
    mean = masked_mean(x, valid)
    return torch.stack((valid.sum().double(), mean, masked_mean((x - mean).square(), valid)))


def merged(each: Tensor) -> Tensor:
    """The moments (..., 3) of everything, from those of its parts (parts, ..., 3)."""
    count, mean, variance = each.unbind(-1)
    total = count.sum(0)
    whole_mean = (count * mean).sum(0) / total.clamp(min=1)
    squares = count * (variance + (mean - whole_mean).square())
    return torch.stack((total, whole_mean, squares.sum(0) / total.clamp(min=1)), -1)


def scaled(x: Tensor, valid: Tensor, of: Tensor, epsilon: float = 1e-8) -> Tensor:
    """`x` shifted and scaled by the moments `of` a whole that it is part of; 0 at entries that are not valid."""
    _, mean, variance = of.unbind(-1)
    return torch.where(valid, (x - mean) / (variance.sqrt() + epsilon), 0.0).to(x.dtype)


def normalize(x: Tensor, valid: Tensor, peers: Peers) -> Tensor:
    """`x` with mean 0 and standard deviation 1 over the valid entries of all learners."""
    if peers.size == 1:
        return masked_normalize(x, valid)
    return scaled(x, valid, merged(peers.gather(moments(x, valid))))


def add_up_observed(network: nn.Module, peers: Peers) -> None:
    """Has the normalisers of `network` take in what all learners observe; after its copies are made."""
    if peers.size == 1:
        return
    for module in network.modules():
        if isinstance(module, Normalizer):
            module.report = partial(_take_in, module, peers)


def _take_in(module: Normalizer, peers: Peers, num_valid: Tensor, mean: Tensor, variance: Tensor) -> None:
    size = len(mean)
    for each in peers.gather(torch.cat((num_valid.double().reshape(1), mean, variance))):
        module.merge(each[0], each[1 : 1 + size], each[1 + size :])


def embed(x: Tensor, others: tuple[int, int]) -> Tensor:
    """`x` (B, F) among as many rows of zeros as other learners have before and after it."""
    return pad(x, (0, 0, *others)) if any(others) else x


def extract(x: Tensor, others: tuple[int, int]) -> Tensor:
    """The rows of `x` that `embed` put there."""
    return x[others[0] : len(x) - others[1]] if any(others) else x
