"""n-step transitions on their way into the group's prioritized buffer, and out of it again.

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
    """Transitions to learn from, and where their priorities belong."""

    state: Named  # (B, ...)
    action: Named
    next_state: Named
    reward: Tensor  # (B,)
    discount: Tensor  # (B,) gamma**n, 0 where the episode terminated
    weight: Tensor  # (B,) importance weights, the largest of them 1
    keys: Any


class TransitionStore:
    """Items become transitions of `n_step` steps, shorter at the end of an episode, in `buffer`.

    Without an item that says so (`terminated`, `truncated` or `terminal`) an episode given step by step has no end, and
    transitions would span it and the next one: with more than one step, say it.
    """

    def __init__(self, buffer: DistributedPrioritizedBuffer, n_step: int, discount: float) -> None:
        self.buffer = buffer
        self._window = NStep(1, n_step, discount)

    def store(self, item: Item) -> None:
        """Takes in one step; appends the transitions that it completes."""
        self._push(item, is_end(item))

    def store_episode(self, episode: Sequence[Item]) -> None:
        """Takes in the steps of an episode, the last of which ends it, whatever it says."""
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
        """A batch drawn from all members by priority."""
        _, fields, keys, weights = self.buffer.sample_batch(
            batch_size, device=device, sample_attrs=WANTED, additional_concat_attrs=["discount"]
        )
        if fields is None:
            raise ConfigError(
                f"{frame}.update: no member holds a transition. Wait until replay_buffer.all_size() says that there "
                "are enough."
            )
        state, action, next_state, reward, discount = fields
        weight = torch.as_tensor(weights, dtype=torch.float32, device=device).reshape(-1)
        return FrameBatch(state, action, next_state, reward.reshape(-1), discount.reshape(-1), weight, keys)

    def learned(self, batch: FrameBatch, errors: Tensor) -> None:
        """Gives the transitions of `batch` the priorities of their TD errors."""
        self.buffer.update_priority(priorities(errors).cpu().numpy(), batch.keys)


def _part(fields: Named, start: str) -> Named:
    return {name.removeprefix(start): x for name, x in fields.items() if name.startswith(start)}


class FollowingError(ConfigError, ValueError):
    """How targets follow is said twice, not at all, or wrongly."""


class Following:
    """When and how far target networks follow: the part `rate` after every update, or all the way every `steps`."""

    def __init__(self, rate: float | None, steps: int | None, frame: str) -> None:
        is_one = (rate is None) != (steps is None)
        if not is_one or (rate is not None and not 0.0 < rate <= 1.0) or (steps is not None and steps < 1):
            raise FollowingError(
                f"{frame}: update_rate={rate} and update_steps={steps}: targets follow by one of them. Set the other "
                "to None; a rate lies above 0 and not above 1, steps are at least 1."
            )
        self.steps = 1 if steps is None else steps
        self._rate = 1.0 if rate is None else rate

    def rate(self, num_updates: int) -> float:
        """The part of the way to go after so many updates."""
        return self._rate if num_updates % self.steps == 0 else 0.0
