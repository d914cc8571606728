"""Action distributions: functions of the parameters a network emits, one class per kind of action space.

`params` has any leading shape and `num_params` last; `action` and `log_prob` have the same leading shape. A mask is a
bool or int tensor with one entry per choice, nonzero where it is allowed (MultiDiscrete: the components side by side);
a row (of a component) without any allowed choice counts as unmasked. Probabilities are computed in float32 whatever the
precision of `params`. Sampling draws from the generator given, never from the global one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from echelon.schema import action_leaf

Array = np.ndarray[Any, Any]
FORBIDDEN = -1e9  # a logit whose probability is exactly 0 in float32, finite so that 0 * log 0 is 0
LOG_SQRT_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class Sample(NamedTuple):
    """A drawn action and its log-probability under the parameters it was drawn from."""

    action: Tensor
    log_prob: Tensor


class Distribution(ABC):
    """How parameters become actions."""

    num_params: int

    @abstractmethod
    def sample(self, params: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Sample:
        """A random action with its log-probability; `generator` lives on the device of `params`."""

    @abstractmethod
    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """The most likely action."""

    @abstractmethod
    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        """The log-probability (density) of `action`."""

    @abstractmethod
    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """The (differential) entropy."""

    @abstractmethod
    def to_env(self, action: Array) -> Array:
        """What the environment receives for `action` (any leading shape)."""


def make_distribution(action_space: gym.Space[Any]) -> Distribution:
    """The distribution for `action_space`; raises ConfigError where none fits."""
    action_leaf(action_space)  # refuses what no policy can fill
    match action_space:
        case gym.spaces.Discrete():
            return Categorical(int(action_space.n), int(action_space.start))
        case gym.spaces.MultiDiscrete():
            return MultiCategorical([int(n) for n in action_space.nvec], action_space.start)
        case gym.spaces.Box():
            return DiagonalGaussian(action_space)
        case _:
            raise AssertionError(f"action_leaf accepted {action_space}, which has no distribution")


def _log_probabilities(logits: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        allowed = mask != 0
        logits = torch.where(allowed | ~allowed.any(-1, keepdim=True), logits.float(), FORBIDDEN)
    return torch.log_softmax(logits, -1, dtype=torch.float32)


def _draw(log_p: Tensor, generator: torch.Generator) -> Tensor:
    """A choice per row: the first to arrive of exponential clocks with rates p (the Gumbel trick, one log fewer)."""
    arrival = torch.empty_like(log_p).exponential_(generator=generator)
    return torch.sub(log_p, arrival.log_()).argmax(-1)


def _take(log_p: Tensor, action: Tensor) -> Tensor:
    return log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(-1)


class Categorical(Distribution):
    """One choice out of `num_choices`; the parameters are logits."""

    def __init__(self, num_choices: int, start: int = 0) -> None:
        self.num_params = num_choices
        self.start = start

    def sample(self, params: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Sample:
        log_p = _log_probabilities(params, mask)
        action = _draw(log_p, generator)
        return Sample(action, _take(log_p, action))

    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return _log_probabilities(params, mask).argmax(-1)

    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        return _take(_log_probabilities(params, mask), action)

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return _entropy(_log_probabilities(params, mask))

    def to_env(self, action: Array) -> Array:
        return action + self.start if self.start else action


class MultiCategorical(Distribution):
    """Independent choices, one per component; the parameters are the components' logits side by side."""

    def __init__(self, num_choices: list[int], start: Array) -> None:
        self.num_params = sum(num_choices)
        self.num_choices = num_choices
        self.start = np.asarray(start, np.int64)

    def _components(self, flat: Tensor, padding: float) -> Tensor:
        """(..., num_params) as (..., components, most choices), padded where a component has fewer."""
        most = max(self.num_choices)
        if min(self.num_choices) == most:
            return flat.reshape(*flat.shape[:-1], len(self.num_choices), most)
        parts = zip(torch.split(flat, self.num_choices, -1), self.num_choices, strict=True)
        return torch.stack([torch.nn.functional.pad(part, (0, most - n), value=padding) for part, n in parts], -2)

    def _log_probabilities(self, params: Tensor, mask: Tensor | None) -> Tensor:
        # float32 before the padding: lower precisions have no room for it
        logits = self._components(params.float(), FORBIDDEN)
        return _log_probabilities(logits, None if mask is None else self._components(mask != 0, 0))

    def sample(self, params: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Sample:
        log_p = self._log_probabilities(params, mask)
        action = _draw(log_p, generator)
        return Sample(action, _take(log_p, action).sum(-1))

    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._log_probabilities(params, mask).argmax(-1)

    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        return _take(self._log_probabilities(params, mask), action).sum(-1)

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return _entropy(self._log_probabilities(params, mask)).sum(-1)

    def to_env(self, action: Array) -> Array:
        return action + self.start


class DiagonalGaussian(Distribution):
    """Independent normals; the parameters are means and log standard deviations side by side.

    An action component with two finite bounds is in units of half its range around the middle, so that -1 and 1 are
    the bounds; any other is in the environment's own units. `to_env` clips to the bounds; probabilities are of the
    unclipped action. There is nothing to mask.
    """

    def __init__(self, space: gym.spaces.Box) -> None:
        self.size = int(space.shape[0])
        self.num_params = 2 * self.size
        self.dtype = space.dtype
        self.low, self.high = space.low.astype(np.float64), space.high.astype(np.float64)
        largest = float(np.finfo(np.float32).max)  # some environments write "unbounded" so
        bounded = (np.abs(self.low) < largest) & (np.abs(self.high) < largest)
        low, high = np.where(bounded, self.low, -1.0), np.where(bounded, self.high, 1.0)
        self.middle, self.half = (low + high) / 2, (high - low) / 2

    def _split(self, params: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        assert mask is None, "a continuous action has no mask"
        mean, log_std = torch.split(params.float(), self.size, -1)
        return mean, log_std

    def sample(self, params: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Sample:
        mean, log_std = self._split(params, mask)
        noise = torch.empty_like(mean).normal_(generator=generator)
        action = torch.addcmul(mean, log_std.exp(), noise)
        return Sample(action, self._log_density(noise, log_std))

    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._split(params, mask)[0]

    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        mean, log_std = self._split(params, mask)
        return self._log_density((action - mean) * (-log_std).exp(), log_std)

    def _log_density(self, noise: Tensor, log_std: Tensor) -> Tensor:
        return torch.addcmul(log_std, noise, noise, value=0.5).sum(-1).neg() - self.size * LOG_SQRT_TWO_PI

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._split(params, mask)[1].sum(-1) + self.size * (0.5 + LOG_SQRT_TWO_PI)

    def to_env(self, action: Array) -> Array:
        return np.clip(self.middle + self.half * action, self.low, self.high).astype(self.dtype)
