"""Stored steps of whole episodes, padded to equal length for recursions over time.

A terminated episode does not bootstrap; any other episode bootstraps from its last `next_state`.

Shapes: N steps of E concatenated episodes; T steps of the longest episode, X = T + 1 rows, E columns.
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
    """Whether the step ends in a terminal state; without `terminated`, `terminal` is used."""
    return bool(item["terminated"] if "terminated" in item else item.get("terminal", False))


def is_end(item: Item) -> bool:
    """Whether the step is the last of its episode."""
    return is_terminated(item) or bool(item.get("truncated", False)) or bool(item.get("terminal", False))


def tidy(item: Item, *also: str) -> dict[str, Any]:
    """Returns the attributes of an item that a frame stores, with the end of the episode as `terminal`.

    `also` names additional attributes. Missing attributes are not an error here: the buffer raises one.
    """
    kept = {name: item[name] for name in ("state", "action", "next_state", "reward", *also) if name in item}
    if "terminated" in item or "terminal" in item:
        kept["terminal"] = is_terminated(item)
    return kept


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of several episodes, concatenated; converts them to and from the padded form for recursions."""

    state: Named  # (N, ...)
    action: Named  # (N, ...)
    last_state: Named  # (E, ...) the observation after the last step of each episode
    reward: Tensor  # (N,)
    terminated: Tensor  # (N,) bool
    log_prob: Tensor | None  # (N,) of the policy that acted, if stored
    lengths: Tensor  # (E,)

    @staticmethod
    def of(attrs: Mapping[str, Any], lengths: Sequence[int]) -> Steps:
        """Returns the steps from the attributes (N, ...) of episodes with these lengths."""
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
        """All states, followed by the last ones: (N + E, ...), so that a critic evaluates them in one pass."""
        return {name: torch.cat((x, self.last_state[name])) for name, x in self.state.items()}

    def rows(self, index: Tensor) -> tuple[Named, Named]:
        """Returns the states and actions of the steps `index`."""
        state, action = ({name: x[index] for name, x in named.items()} for named in (self.state, self.action))
        return state, action

    def pad(self, x_N: Tensor) -> Tensor:
        """Converts (N,) to (T, E), with zeros (False) after the end of a shorter episode."""
        x_TE = x_N.new_zeros(int(self.lengths.max()), len(self.lengths))
        return x_TE.index_put_(self._places(), x_N)

    def pad_values(self, value: Tensor) -> Tensor:
        """Converts values of `observed`, (N + E,), to (X, E): the value of a last state follows its episode."""
        value_XE = value.new_zeros(int(self.lengths.max()) + 1, len(self.lengths))
        value_XE.index_put_(self._places(), value[: len(self)])
        episode_E = torch.arange(len(self.lengths), device=self.lengths.device)
        return value_XE.index_put_((self.lengths, episode_E), value[len(self) :])

    def unpad(self, x_TE: Tensor) -> Tensor:
        """Converts (T, E) to (N,): the inverse of `pad`."""
        return x_TE[self._places()]

    @property
    def valid_TE(self) -> Tensor:
        """True where the padded form has a step."""
        return self.pad(torch.ones_like(self.terminated))

    def discounts(self, discount: float, like: Tensor) -> Tensor:
        """Returns the discount of every step (N,): 0 where the episode terminated."""
        return (discount * (~self.terminated)).to(like)

    def _places(self) -> tuple[Tensor, Tensor]:
        """Returns the row and column of every step (N,) in the padded form."""
        device = self.lengths.device
        episode_N = torch.arange(len(self.lengths), device=device).repeat_interleave(self.lengths)
        starts_E = self.lengths.cumsum(0) - self.lengths
        return torch.arange(len(self), device=device) - starts_E[episode_N], episode_N


def _one_each(x: Tensor, name: str) -> Tensor:
    if x.numel() != len(x):
        raise ConfigError(f"{name} of an item has the shape {tuple(x.shape[1:])}; it must be one number per step.")
    return x.reshape(-1)
