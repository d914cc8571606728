"""Target networks: delayed copies from which targets are computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echelon.algorithms.model import FlatModule
from echelon.schema import Tree


class TargetNetwork:
    """A copy of a network with soft updates of rate `tau`."""

    def __init__(self, source: FlatModule, *, tau: float = 1.0) -> None:
        self.source, self.tau = source, tau
        self.flat = source.copy()
        self._first = torch.zeros(0, dtype=torch.bool, device=source.device)

    @property
    def network(self) -> Any:
        return self.flat.network

    def params(self, observation: Tree) -> Tensor:
        """Returns the action parameters of single steps (B, ...), if the source is a network that acts."""
        params: Tensor = self.network.act(observation, (), self._first).params
        return params

    @torch.no_grad()
    def follow(self) -> None:
        """Moves the copy towards the source by `tau`."""
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
