"""Action distributions: functions of a network's output, one class per kind of action space.

`params` has any leading shape and `num_params` as its last dimension; `action` and `log_prob` have the same leading
shape. A mask is a bool or int tensor with one entry per choice, nonzero where the choice is allowed (MultiDiscrete: the
components concatenated); a row (of a component) without any allowed choice counts as unmasked. Probabilities are
computed in float32 for any precision of `params`. Sampling uses the given generator, never the global one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from echelon.errors import ConfigError
from echelon.schema import SUPPORTED_ACTIONS, action_leaf

Array = np.ndarray[Any, Any]
FORBIDDEN = -1e9  # a logit whose probability is exactly 0 in float32; finite, so that 0 * log 0 is 0
LOG_SQRT_TWO_PI = 0.5 * math.log(2.0 * math.pi)
LOG_TWO = math.log(2.0)

Kind = Literal["stochastic", "greedy", "deterministic", "squashed"]


class Sample(NamedTuple):
    """A sampled action and its log-probability."""

    action: Tensor
    log_prob: Tensor


class Distribution(ABC):
    """Maps parameters to actions."""

    num_params: int
    noise_size = 0  # of the standard normal noise that `sample` draws; 0: it draws something else

    @abstractmethod
    def sample(self, params: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Sample:
        """Samples an action, with its log-probability; `generator` must be on the device of `params`."""

    def sample_at(self, params: Tensor, noise: Tensor) -> Sample:
        """Returns the sample that standard normal `noise` (..., noise_size) yields, as if `sample` had drawn it."""
        raise NotImplementedError(f"{type(self).__name__} is not computed from normal noise")

    @abstractmethod
    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the most likely action."""

    @abstractmethod
    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the log-probability (density) of `action`."""

    @abstractmethod
    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the (differential) entropy."""

    def random(self, params: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Tensor:
        """Samples one uniformly random action per row of `params`."""
        return self.sample(torch.zeros_like(params), generator, mask).action

    @abstractmethod
    def to_env(self, action: Array) -> Array:
        """Converts `action` (any leading shape) to the environment's units."""

    @abstractmethod
    def tensor_to_env(self, action: Tensor) -> Tensor:
        """Does what `to_env` does with operations of torch, for exported graphs."""


def make_distribution(action_space: gym.Space[Any], kind: Kind = "stochastic") -> Distribution:
    """Returns the distribution for `action_space`; raises ConfigError if none fits.

    Policy gradients use "stochastic". Value-based algorithms use "greedy" (the choice with the highest value),
    "deterministic" (bounded continuous actions without randomness) or "squashed" (bounded continuous actions, sampled;
    discrete actions are sampled as in "stochastic").
    """
    action_leaf(action_space)  # raises on action spaces that no policy supports
    if not isinstance(action_space, SUPPORTED_ACTIONS[kind]):
        fits = {"greedy": "Discrete", "deterministic": "bounded Box", "squashed": "bounded Box and Discrete"}[kind]
        raise ConfigError(
            f"the action space {action_space} does not fit: this algorithm supports {fits} action spaces. Use another "
            "preset (impala and ppo support all of them), or wrap the environment to convert its actions."
        )
    match action_space:
        case gym.spaces.Discrete():
            return (Greedy if kind == "greedy" else Categorical)(int(action_space.n), int(action_space.start))
        case gym.spaces.MultiDiscrete():
            return MultiCategorical([int(n) for n in action_space.nvec], action_space.start)
        case gym.spaces.Box() if kind == "deterministic":
            return Deterministic(action_space)
        case gym.spaces.Box() if kind == "squashed":
            return SquashedGaussian(action_space)
        case gym.spaces.Box():
            return DiagonalGaussian(action_space)
        case _:
            raise AssertionError(action_space)


def forbid(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Returns `scores` with forbidden actions set to the lowest score; a mask that allows none allows all."""
    if mask is None:
        return scores
    allowed = mask != 0
    return torch.where(allowed | ~allowed.any(-1, keepdim=True), scores.float(), FORBIDDEN)


def num_allowed(mask: Tensor) -> Tensor:
    """Returns the number of actions that each row of `mask` allows; a mask that allows none allows all."""
    count = (mask != 0).sum(-1)
    return torch.where(count > 0, count, mask.shape[-1])


def _log_probabilities(logits: Tensor, mask: Tensor | None) -> Tensor:
    return torch.log_softmax(forbid(logits, mask), -1, dtype=torch.float32)


def _draw(log_p: Tensor, generator: torch.Generator) -> Tensor:
    """Samples a choice per row: the first of exponential clocks with rates p to ring (Gumbel trick, one log fewer)."""
    arrival = torch.empty_like(log_p).exponential_(generator=generator)
    return torch.sub(log_p, arrival.log_()).argmax(-1)


def _take(log_p: Tensor, action: Tensor) -> Tensor:
    return log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(-1)


class Categorical(Distribution):
    """One of `num_choices` choices; the parameters are logits."""

    def __init__(self, num_choices: int, start: int = 0) -> None:
        self.num_params = num_choices
        self.start = start

    def log_probabilities(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the log-probability of every choice; a forbidden one is finite, with a probability of exactly 0."""
        return _log_probabilities(params, mask)

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

    def tensor_to_env(self, action: Tensor) -> Tensor:
        return action + self.start


class Greedy(Categorical):
    """The choice with the highest value, without randomness; the parameters are the values of the choices."""

    def sample(self, params: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Sample:
        return Sample(self.mode(params, mask), params.new_zeros(params.shape[:-1]))

    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return forbid(params, mask).argmax(-1)

    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        return params.new_zeros(params.shape[:-1])

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return params.new_zeros(params.shape[:-1])

    def random(self, params: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Tensor:
        return _draw(_log_probabilities(torch.zeros_like(params), mask), generator)


class MultiCategorical(Distribution):
    """Independent choices, one per component; the parameters are the components' logits, concatenated."""

    def __init__(self, num_choices: list[int], start: Array) -> None:
        self.num_params = sum(num_choices)
        self.num_choices = num_choices
        self.start = np.asarray(start, np.int64)

    def _components(self, flat: Tensor, padding: float) -> Tensor:
        """Reshapes (..., num_params) to (..., components, most choices), padded where a component has fewer choices."""
        most = max(self.num_choices)
        if min(self.num_choices) == most:
            return flat.reshape(*flat.shape[:-1], len(self.num_choices), most)
        parts = zip(torch.split(flat, self.num_choices, -1), self.num_choices, strict=True)
        return torch.stack([torch.nn.functional.pad(part, (0, most - n), value=padding) for part, n in parts], -2)

    def _log_probabilities(self, params: Tensor, mask: Tensor | None) -> Tensor:
        # Convert to float32 before padding: lower precisions cannot represent the padding.
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

    def tensor_to_env(self, action: Tensor) -> Tensor:
        return action + torch.from_numpy(self.start)


class ActionScale:
    """Converts actions between the policy's units and the environment's.

    An action component with two finite bounds is scaled by half its range around the middle, so that -1 and 1 are the
    bounds; any other component keeps the environment's units.
    """

    def __init__(self, space: gym.spaces.Box) -> None:
        self.dtype = space.dtype
        self.low, self.high = space.low.astype(np.float64), space.high.astype(np.float64)
        largest = float(np.finfo(np.float32).max)  # some environments use it for "unbounded"
        self.bounded = (np.abs(self.low) < largest) & (np.abs(self.high) < largest)
        low, high = np.where(self.bounded, self.low, -1.0), np.where(self.bounded, self.high, 1.0)
        self.middle, self.half = (low + high) / 2, (high - low) / 2

    def to_env(self, action: Array) -> Array:
        return np.clip(self.middle + self.half * action, self.low, self.high).astype(self.dtype)

    def tensor_to_env(self, action: Tensor) -> Tensor:
        bounds = (self.middle, self.half, self.low, self.high)  # in float32: few runtimes compute in float64
        middle, half, low, high = (torch.from_numpy(bound).float() for bound in bounds)
        scaled = (middle + half * action).clamp(low, high)
        return scaled.to(torch.from_numpy(np.empty(0, self.dtype)).dtype)


class DiagonalGaussian(Distribution):
    """Independent normals; the parameters are means and log standard deviations, concatenated.

    Actions are in the units of `ActionScale`; `to_env` clips to the bounds; log-probabilities are of the unclipped
    action. There are no masks.
    """

    def __init__(self, space: gym.spaces.Box) -> None:
        self.size = self.noise_size = int(space.shape[0])
        self.num_params = 2 * self.size
        self.scale = ActionScale(space)

    def _split(self, params: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        assert mask is None, "a continuous action has no mask"
        mean, log_std = torch.split(params.float(), self.size, -1)
        return mean, log_std

    def sample(self, params: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Sample:
        assert mask is None, "a continuous action has no mask"
        noise = torch.empty_like(params[..., : self.size], dtype=torch.float32).normal_(generator=generator)
        return self.sample_at(params, noise)

    def sample_at(self, params: Tensor, noise: Tensor) -> Sample:
        mean, log_std = self._split(params, None)
        return Sample(torch.addcmul(mean, log_std.exp(), noise), self._log_density(noise, log_std))

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
        return self.scale.to_env(action)

    def tensor_to_env(self, action: Tensor) -> Tensor:
        return self.scale.tensor_to_env(action)


class Deterministic(Distribution):
    """The tanh of the parameters, without randomness, in units in which -1 and 1 are the bounds."""

    def __init__(self, space: gym.spaces.Box) -> None:
        self.num_params = self.size = int(space.shape[0])
        self.scale = ActionScale(space)
        if not self.scale.bounded.all():
            raise ConfigError(
                f"the action space {space} has no bounds in components {np.flatnonzero(~self.scale.bounded).tolist()}; "
                "this algorithm needs bounded actions. Wrap the environment (gymnasium.wrappers.TransformAction, with "
                "a bounded action_space), or use impala or ppo."
            )

    def sample(self, params: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Sample:
        return Sample(self.mode(params, mask), params.new_zeros(params.shape[:-1]))

    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is None, "a continuous action has no mask"
        return torch.tanh(params[..., : self.size])

    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        return params.new_zeros(params.shape[:-1])

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return params.new_zeros(params.shape[:-1])

    def random(self, params: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Tensor:
        return params.new_empty(*params.shape[:-1], self.size).uniform_(-1.0, 1.0, generator=generator)

    def to_env(self, action: Array) -> Array:
        return self.scale.to_env(action)

    def tensor_to_env(self, action: Tensor) -> Tensor:
        return self.scale.tensor_to_env(action)


class SquashedGaussian(Deterministic):
    """The tanh of independent normals (Haarnoja et al., 2018, appendix C), in units in which -1 and 1 are the bounds.

    The parameters are the means before the tanh and unbounded values that are mapped smoothly to the range of the log
    standard deviations.
    `sample` is differentiable in the parameters.
    """

    LOW, HIGH = -5.0, 2.0  # log standard deviations
    EDGE = 1.0 - 1e-6  # stored actions are clamped to this, as the inverse tanh of 1 is infinite
    NUM_NODES = 32

    def __init__(self, space: gym.spaces.Box) -> None:
        super().__init__(space)
        self.noise_size, self.num_params = self.size, 2 * self.size
        node, weight = np.polynomial.hermite_e.hermegauss(self.NUM_NODES)
        self.node = torch.as_tensor(node, dtype=torch.float32)
        self.weight = torch.as_tensor(weight / weight.sum(), dtype=torch.float32)

    def _split(self, params: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = torch.split(params.float(), self.size, -1)
        return mean, self.LOW + 0.5 * (self.HIGH - self.LOW) * (torch.tanh(raw) + 1.0)

    def sample(self, params: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Sample:
        assert mask is None, "a continuous action has no mask"
        noise = torch.empty_like(params[..., : self.size], dtype=torch.float32).normal_(generator=generator)
        return self.sample_at(params, noise)

    def sample_at(self, params: Tensor, noise: Tensor) -> Sample:
        mean, log_std = self._split(params)
        before = torch.addcmul(mean, log_std.exp(), noise)
        return Sample(torch.tanh(before), self._log_density(noise, log_std, before))

    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        mean, log_std = self._split(params)
        before = torch.atanh(action.float().clamp(-self.EDGE, self.EDGE))
        return self._log_density((before - mean) * (-log_std).exp(), log_std, before)

    def _log_density(self, noise: Tensor, log_std: Tensor, before: Tensor) -> Tensor:
        normal = torch.addcmul(log_std, noise, noise, value=0.5)
        return (normal + _log_slope(before)).sum(-1).neg() - self.size * LOG_SQRT_TWO_PI

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the entropy of the normals plus the mean log slope of the tanh, by Gauss-Hermite quadrature."""
        mean, log_std = self._split(params)
        before = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * self.node.to(mean.device)
        slope = (_log_slope(before) * self.weight.to(mean.device)).sum(-1)
        return (log_std + slope).sum(-1) + self.size * (0.5 + LOG_SQRT_TWO_PI)


def _log_slope(before: Tensor) -> Tensor:
    """Returns log(1 - tanh(x)^2) in a form that neither overflows nor cancels."""
    return 2.0 * (LOG_TWO - before - softplus(-2.0 * before))
