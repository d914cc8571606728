"""Several learners that share a batch, from the view of an algorithm: its own rows, and sums over all learners.

Every learner computes, on its own rows, what a single learner would compute on the whole batch: it draws random numbers
for the whole batch from the same generator and keeps those of its rows, and statistics cover all rows. All learners
therefore make the same steps and need not exchange weights.
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
    """The learners of a run; `rank` is the index of this one. All learners make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def spent_s(self) -> float:
        """Seconds spent in calls so far, including waiting for other learners."""

    def gather(self, x: Tensor) -> Tensor:
        """Returns the `x` of all learners, stacked in the order of their ranks."""

    def add_up(self, x: Tensor) -> None:
        """Replaces `x` by its sum over all learners."""

    def take_first(self, x: Tensor) -> None:
        """Replaces `x` by the `x` of the first learner."""


class Alone:
    """The peers of a single learner: none."""

    rank, size, spent_s = 0, 1, 0.0

    def gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def add_up(self, x: Tensor) -> None:
        """Does nothing: `x` is the sum."""

    def take_first(self, x: Tensor) -> None:
        """Does nothing: this is the first learner."""


ALONE = Alone()


def moments(x: Tensor, valid: Tensor) -> Tensor:
    """Returns the number of valid entries of `x`, their mean and their variance."""
    x = x.double()
    mean = masked_mean(x, valid)
    return torch.stack((valid.sum().double(), mean, masked_mean((x - mean).square(), valid)))


def merged(each: Tensor) -> Tensor:
    """Merges the moments of parts (parts, ..., 3) to those of the whole (..., 3)."""
    count, mean, variance = each.unbind(-1)
    total = count.sum(0)
    whole_mean = (count * mean).sum(0) / total.clamp(min=1)
    squares = count * (variance + (mean - whole_mean).square())
    return torch.stack((total, whole_mean, squares.sum(0) / total.clamp(min=1)), -1)


def scaled(x: Tensor, valid: Tensor, of: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Normalizes `x` by the moments `of` the whole that it is a part of; 0 at invalid entries."""
    _, mean, variance = of.unbind(-1)
    return torch.where(valid, (x - mean) / (variance.sqrt() + epsilon), 0.0).to(x.dtype)


def normalize(x: Tensor, valid: Tensor, peers: Peers) -> Tensor:
    """Normalizes `x` to mean 0 and standard deviation 1 over the valid entries of all learners."""
    if peers.size == 1:
        return masked_normalize(x, valid)
    return scaled(x, valid, merged(peers.gather(moments(x, valid))))


def add_up_observed(network: nn.Module, peers: Peers) -> None:
    """Makes the normalizers of `network` merge the observations of all learners; call it after copying the network."""
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
    """Pads `x` (B, F) with zero rows for the transitions of learners of lower and of higher rank."""
    return pad(x, (0, 0, *others)) if any(others) else x


def extract(x: Tensor, others: tuple[int, int]) -> Tensor:
    """Returns the rows of this learner: the inverse of `embed`."""
    return x[others[0] : len(x) - others[1]] if any(others) else x
