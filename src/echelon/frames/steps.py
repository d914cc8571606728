"""Stored steps of whole episodes, laid side by side for the recursions that go over them.

A step that terminated has no future; any other end of an episode bootstraps from its last `next_state`.

Shapes: N steps of E episodes end to end; T steps of the longest, X = T + 1 rows, E lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.errors import ConfigError

Item = Mapping[str, Any]
Named = dict[str, Tensor]


def is_terminated(item: Item) -> bool:
    """Whether nothing comes after the step; `terminal` counts as that where `terminated` is not said."""
    return bool(item["terminated"] if "terminated" in item else item.get("terminal", False))


def is_end(item: Item) -> bool:
    """Whether the step is the last of its episode."""
    return is_terminated(item) or bool(item.get("truncated", False)) or bool(item.get("terminal", False))


def tidy(item: Item, *also: str) -> dict[str, Any]:
    """What a frame keeps of an item, however it says that the step was the last; `also` are further numbers.

    Attributes that are missing stay so: the buffer says which.
    """
    kept = {name: item[name] for name in ("state", "action", "next_state", "reward", *also) if name in item}
    if "terminated" in item or "terminal" in item:
        kept["terminal"] = is_terminated(item)
    return kept


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of several episodes, end to end, and the lanes in which recursions go over them."""

    state: Named  # (N, ...)
    action: Named  # (N, ...)
    last_state: Named  # (E, ...) what was observed after the last step of each episode
    reward: Tensor  # (N,)
    terminated: Tensor  # (N,) bool
    log_prob: Tensor | None  # (N,) of the policy that acted, where it is known
    lengths: Tensor  # (E,)

    @staticmethod
    def of(attrs: Mapping[str, Any], lengths: Sequence[int]) -> Steps:
        """Steps from the attributes (N, ...) of episodes with these lengths."""
        reward: Tensor = attrs["reward"].reshape(-1)
        ends = torch.tensor(lengths, device=reward.device).cumsum(0) - 1
        log_prob = attrs.get("action_log_prob")
        return Steps(
            state=attrs["state"],
            action=attrs["action"],
            last_state={name: x[ends] for name, x in attrs["next_state"].items()},
            reward=reward,
            terminated=attrs["terminal"].reshape(-1).bool(),
            log_prob=None if log_prob is None else _one_each(log_prob, "action_log_prob"),
            lengths=torch.tensor(lengths, device=reward.device),
        )

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def observed(self) -> Named:
        """Every state and then the last ones: (N + E, ...), so that a critic judges all of them in one pass."""
        return {name: torch.cat((x, self.last_state[name])) for name, x in self.state.items()}

    def rows(self, index: Tensor) -> tuple[Named, Named]:
        """States and actions of some steps."""
        state, action = ({name: x[index] for name, x in named.items()} for named in (self.state, self.action))
        return state, action

    def to_lanes(self, x_N: Tensor) -> Tensor:
        """(N,) as (T, E), with zeros (False) after the end of a shorter episode."""
        x_TE = x_N.new_zeros(int(self.lengths.max()), len(self.lengths))
        return x_TE.index_put_(self._places(), x_N)

    def to_rows(self, value: Tensor) -> Tensor:
        """Values of `observed`, (N + E,), as (X, E): those of the last states follow their episodes."""
        value_XE = value.new_zeros(int(self.lengths.max()) + 1, len(self.lengths))
        value_XE.index_put_(self._places(), value[: len(self)])
        lane_E = torch.arange(len(self.lengths), device=self.lengths.device)
        return value_XE.index_put_((self.lengths, lane_E), value[len(self) :])

    def from_lanes(self, x_TE: Tensor) -> Tensor:
        """The inverse of `to_lanes`."""
        return x_TE[self._places()]

    @property
    def valid_TE(self) -> Tensor:
        """Where lanes hold a step."""
        return self.to_lanes(torch.ones_like(self.terminated))

    def discounts(self, discount: float, like: Tensor) -> Tensor:
        """The discount of every step (N,): 0 where its episode terminated."""
        return (discount * (~self.terminated)).to(like)

    def _places(self) -> tuple[Tensor, Tensor]:
        """Step and lane of every step (N,)."""
        device = self.lengths.device
        lane_N = torch.arange(len(self.lengths), device=device).repeat_interleave(self.lengths)
        starts_E = self.lengths.cumsum(0) - self.lengths
        return torch.arange(len(self), device=device) - starts_E[lane_N], lane_N


def _one_each(x: Tensor, name: str) -> Tensor:
    if x.numel() != len(x):
        raise ConfigError(f"{name} of an item is {tuple(x.shape[1:])}; it must be one number for the step.")
    return x.reshape(-1)
