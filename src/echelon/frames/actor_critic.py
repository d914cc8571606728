"""What the frames with an actor and a critic share: asking both about stored steps, and the policy's loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.errors import ConfigError
from echelon.frames.modules import call, first
from echelon.objectives.policy_gradient import entropy_loss, policy_gradient_loss


class Judged(NamedTuple):
    """What the actor says about actions that were taken: (N,) each."""

    log_prob: Tensor
    entropy: Tensor | None  # None where the actor does not tell


def judge(actor: nn.Module, state: Mapping[str, Any], action: Mapping[str, Any]) -> Judged:
    """The actor's opinion of the actions; it returns action, log-probability and perhaps entropy."""
    output = call(actor, state, action)
    if not isinstance(output, tuple | list) or len(output) < 2:
        raise ConfigError(
            f"the actor {type(actor).__name__} returned {type(output).__name__}; forward(state, action) must return "
            "the action, its log-probability and, for an entropy_weight, the entropy."
        )
    return Judged(_per_step(output[1]), _per_step(output[2]) if len(output) > 2 else None)


def _per_step(x: Tensor) -> Tensor:
    """(N, ...) as (N,): what independent components say adds up."""
    return x.reshape(len(x), -1).sum(-1)


def values(critic: nn.Module, state: Mapping[str, Any]) -> Tensor:
    """The critic's values of states: (N,)."""
    return first(call(critic, state)).reshape(-1)


def policy_loss(judged: Judged, advantage: Tensor, entropy_weight: float | None) -> Tensor:
    """The policy gradient's loss, less `entropy_weight` times the entropy: means over steps."""
    valid = torch.ones_like(advantage, dtype=torch.bool)
    loss = policy_gradient_loss(judged.log_prob, advantage, valid)
    if entropy_weight is None:
        return loss
    if judged.entropy is None:
        raise ConfigError(
            f"entropy_weight={entropy_weight} needs the entropy as the third value that the actor returns."
        )
    return loss + entropy_weight * entropy_loss(judged.entropy, valid)


def check_entropy_weight(weight: float | None, frame: str) -> None:
    """Refuses a negative weight, which in Machin meant what a positive one means here."""
    if weight is not None and weight < 0.0:
        raise ConfigError(
            f"{frame}: entropy_weight={weight} is negative. Here a positive weight keeps the policy exploring (Machin "
            f"has it the other way round): write entropy_weight={-weight}."
        )
