"""Parts for frame tests in one process: a group of one, servers that record what they receive, tiny linear models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LocalGroup:
    """A group with one member, so no remote calls."""

    def get_cur_name(self) -> str:
        return "alone"

    def get_group_members(self) -> list[str]:
        return ["alone"]

    def register(self, key: str, service: Any) -> None:
        """Does nothing: there are no remote callers."""

    def check_world(self, what: str) -> None:
        """Never raises: this world does not end."""


class ModelKeeper:
    """A model server that counts pushes and returns the last one."""

    def __init__(self) -> None:
        self.pushed: list[dict[str, Tensor]] = []
        self.num_pulls = 0

    def push(self, model: nn.Module, pull_on_fail: bool = True) -> bool:
        self.pushed.append({name: x.clone() for name, x in model.state_dict().items()})
        return True

    def pull(self, model: nn.Module) -> bool:
        self.num_pulls += 1
        if self.pushed:
            model.load_state_dict(self.pushed[-1])
        return bool(self.pushed)


class GradKeeper:
    """A gradient server that records gradients and makes no optimizer steps."""

    def __init__(self) -> None:
        self.pushed: list[Tensor] = []

    def push(self, model: nn.Module) -> None:
        self.pushed.append(torch.cat([p.grad.reshape(-1).clone() for p in model.parameters() if p.grad is not None]))

    def pull(self, model: nn.Module) -> bool:
        return False


class LinearQ(nn.Module):
    """Values of 2 actions, linear in 2 numbers of state."""

    def __init__(self, weight: list[list[float]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, state: Tensor) -> Tensor:
        return state @ self.weight.T


class LinearActor(LinearQ):
    """A choice of 2 actions, whose logits are linear in the state."""

    def forward(self, state: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        distribution = torch.distributions.Categorical(logits=super().forward(state))
        taken = distribution.sample() if action is None else action.reshape(-1)
        return taken.unsqueeze(-1), distribution.log_prob(taken), distribution.entropy()


class LinearCritic(nn.Module):
    """A value, linear in 2 numbers of state."""

    def __init__(self, weight: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, state: Tensor) -> Tensor:
        return (state @ self.weight).unsqueeze(-1)


class LinearPolicy(nn.Module):
    """One continuous action, linear in the state."""

    def __init__(self, weight: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, state: Tensor) -> Tensor:
        return (state @ self.weight).unsqueeze(-1)


class ActionCritic(nn.Module):
    """The value of an action: w · s + u a."""

    def __init__(self, weight: list[float], slope: float) -> None:
        super().__init__()
        self.weight, self.slope = nn.Parameter(torch.tensor(weight)), nn.Parameter(torch.tensor(slope))

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        return (state @ self.weight).unsqueeze(-1) + self.slope * action


def item(state: list[float], action: float, reward: float, next_state: list[float], **ends: Any) -> dict[str, Any]:
    """Returns a step as users store it; an integer action is discrete."""
    kind = torch.int64 if isinstance(action, int) else torch.float32
    return {
        "state": {"state": torch.tensor([state])},
        "action": {"action": torch.tensor([[action]], dtype=kind)},
        "next_state": {"state": torch.tensor([next_state])},
        "reward": reward,
        **(ends or {"terminated": False}),
    }


def near(actual: torch.Tensor, expected: Any) -> bool:
    return torch.allclose(actual.detach().double().cpu(), torch.tensor(expected, dtype=torch.float64), atol=1e-5)
