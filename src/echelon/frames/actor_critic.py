"""The common part of the actor-critic frames: evaluation of stored steps by both networks, and the policy loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.errors import ConfigError
from echelon.frames.modules import call, first
from echelon.objectives.policy_gradient import entropy_loss, policy_gradient_loss


class EvaluatedActions(NamedTuple):
    """The actor's evaluation of actions that were taken: (N,) each."""

    log_prob: Tensor
    entropy: Tensor | None  # None if the actor does not return it


def evaluate_actions(actor: nn.Module, state: Mapping[str, Any], action: Mapping[str, Any]) -> EvaluatedActions:
    """Evaluates `action` by the actor, which returns action, log-probability and optionally entropy."""
    output = call(actor, state, action)
    if not isinstance(output, tuple | list) or len(output) < 2:
        raise ConfigError(
            f"the actor {type(actor).__name__} returned {type(output).__name__}; forward(state, action) must return "
            "the action, its log-probability and, for an entropy_weight, the entropy."
        )
    return EvaluatedActions(_per_step(output[1]), _per_step(output[2]) if len(output) > 2 else None)


def _per_step(x: Tensor) -> Tensor:
    """Sums (N, ...) to (N,): log-probabilities and entropies of independent components add up."""
    return x.reshape(len(x), -1).sum(-1)


def values(critic: nn.Module, state: Mapping[str, Any]) -> Tensor:
    """Returns the critic's values of states: (N,)."""
    return first(call(critic, state)).reshape(-1)


def policy_loss(evaluated: EvaluatedActions, advantage: Tensor, entropy_weight: float | None) -> Tensor:
    """Returns the policy gradient loss minus `entropy_weight` times the entropy, both means over steps."""
    valid = torch.ones_like(advantage, dtype=torch.bool)
    loss = policy_gradient_loss(evaluated.log_prob, advantage, valid)
    if entropy_weight is None:
        return loss
    if evaluated.entropy is None:
        raise ConfigError(
            f"entropy_weight={entropy_weight} needs an actor that returns the entropy as its third value."
        )
    return loss + entropy_weight * entropy_loss(evaluated.entropy, valid)


def check_entropy_weight(weight: float | None, frame: str) -> None:
    """Raises ConfigError on a negative weight, which in Machin means what a positive one means here."""
    if weight is not None and weight < 0.0:
        raise ConfigError(
            f"{frame}: entropy_weight={weight} is negative. Here a positive weight encourages exploration (in Machin "
            f"the sign is the opposite): write entropy_weight={-weight}."
        )
