"""Target networks: slow copies that targets are computed from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echelon.algorithms.model import FlatModule
from echelon.schema import Tree


class TargetNetwork:
    """A copy of a network that follows it, by the part `tau` of the way at a time."""

    def __init__(self, source: FlatModule, *, tau: float = 1.0) -> None:
        self.source, self.tau = source, tau
        self.flat = source.copy()
        self._first = torch.zeros(0, dtype=torch.bool, device=source.device)

    @property
    def network(self) -> Any:
        return self.flat.network

    def params(self, observation: Tree) -> Tensor:
        """What it says about single steps (B, ...) if it copies a network that acts."""
        params: Tensor = self.network.act(observation, (), self._first).params
        return params

    @torch.no_grad()
    def follow(self) -> None:
        """Goes its part of the way to what the source is now."""
        mine, other = self.flat.tensors(), self.source.tensors()
        if self.tau == 1.0:
            mine[0].copy_(other[0])
        else:
            mine[0].lerp_(other[0], self.tau)
        for target, buffer in zip(mine[1:], other[1:], strict=True):  # statistics of the observations
            target.copy_(buffer)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.flat.weights()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        weights: dict[str, Tensor] = state["weights"]
        self.flat.load_weights(weights, "the checkpoint's target network")
