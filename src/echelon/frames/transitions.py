"""n-step transitions: storing them in the group's prioritized buffer, and sampling from it; target update rules.

Shapes: B transitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.errors import ConfigError
from echelon.frames.steps import Item, Named, is_end, is_terminated, tidy
from echelon.objectives.values import priorities
from echelon.replay.nstep import NStep
from echelon.servers.buffer_items import flatten
from echelon.servers.buffer_prioritized import DistributedPrioritizedBuffer

WANTED = ["state", "action", "next_state", "reward", "discount"]


@dataclass(frozen=True, slots=True)
class FrameBatch:
    """A batch of transitions, and the keys for updating their priorities."""

    state: Named  # (B, ...)
    action: Named
    next_state: Named
    reward: Tensor  # (B,)
    discount: Tensor  # (B,) gamma**n, 0 where the episode terminated
    weight: Tensor  # (B,) importance weights, the largest is 1
    keys: Any


class TransitionStore:
    """Stores items in `buffer` as transitions of `n_step` steps, shorter at the end of an episode.

    If items are stored one by one and `n_step` is above 1, the last item of an episode must be marked (`terminated`,
    `truncated` or `terminal`); otherwise transitions would span two episodes.
    """

    def __init__(self, buffer: DistributedPrioritizedBuffer, n_step: int, discount: float) -> None:
        self.buffer = buffer
        self._window = NStep(1, n_step, discount)

    def store(self, item: Item) -> None:
        """Adds one step; appends the transitions that it completes to the buffer."""
        self._push(item, is_end(item))

    def store_episode(self, episode: Sequence[Item]) -> None:
        """Adds the steps of an episode; the last step ends it even if it is not marked."""
        for position, item in enumerate(episode, start=1):
            self._push(item, position == len(episode) or is_end(item))

    def _push(self, item: Item, is_last: bool) -> None:
        fields = flatten(tidy(item))
        begun = {name: x for name, x in fields.items() if name.startswith(("state/", "action/"))}
        terminated = is_terminated(item)
        complete = self._window.push(
            begun,
            np.array([float(fields["reward"].item())]),
            (np.array([terminated]), np.array([is_last and not terminated])),
            np.array([True]),
        )
        for row, (reward, discount) in enumerate(zip(complete.reward, complete.discount, strict=True)):
            start = {name: torch.from_numpy(x[row : row + 1].copy()) for name, x in complete.start.items()}
            self.buffer.append(
                {
                    "state": _part(start, "state/"),
                    "action": _part(start, "action/"),
                    "next_state": item["next_state"],
                    "reward": float(reward),
                    "discount": float(discount),
                    "terminal": terminated,
                }
            )

    def draw(self, batch_size: int, device: str | torch.device, frame: str) -> FrameBatch:
        """Samples a batch from all members by priority."""
        _, fields, keys, weights = self.buffer.sample_batch(
            batch_size, device=device, sample_attrs=WANTED, additional_concat_attrs=["discount"]
        )
        if fields is None:
            raise ConfigError(
                f"{frame}.update: no member has a transition. Wait until replay_buffer.all_size() is large enough."
            )
        state, action, next_state, reward, discount = fields
        weight = torch.as_tensor(weights, dtype=torch.float32, device=device).reshape(-1)
        return FrameBatch(state, action, next_state, reward.reshape(-1), discount.reshape(-1), weight, keys)

    def update_priorities(self, batch: FrameBatch, errors: Tensor) -> None:
        """Sets the priorities of the transitions of `batch` from their TD errors."""
        self.buffer.update_priority(priorities(errors).cpu().numpy(), batch.keys)


def _part(fields: Named, start: str) -> Named:
    return {name.removeprefix(start): x for name, x in fields.items() if name.startswith(start)}


class TargetUpdateError(ConfigError, ValueError):
    """Both or none of update_rate and update_steps are set, or a value is invalid."""


class TargetUpdateRule:
    """When and how far target networks are updated: by `rate` after every update, or completely every `steps`."""

    def __init__(self, rate: float | None, steps: int | None, frame: str) -> None:
        is_one = (rate is None) != (steps is None)
        if not is_one or (rate is not None and not 0.0 < rate <= 1.0) or (steps is not None and steps < 1):
            raise TargetUpdateError(
                f"{frame}: update_rate={rate} and update_steps={steps}: set one of them, and the other to None. "
                "update_rate must be above 0 and at most 1, update_steps at least 1."
            )
        self.steps = 1 if steps is None else steps
        self._rate = 1.0 if rate is None else rate

    def rate(self, num_updates: int) -> float:
        """Returns the rate of the soft update after `num_updates`; 0 if none is due."""
        return self._rate if num_updates % self.steps == 0 else 0.0
