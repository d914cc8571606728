"""A network of your own: `--network.name network.py:make`.

`make` is called once per process with the spaces and the number of action parameters: 4 logits for Discrete(4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class MazeNetwork(nn.Module):
    """Convolutions over the picture; the compass joins their features."""

    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.picture = nn.Sequential(
            nn.Conv2d(3, 16, 4, stride=4), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten()
        )
        self.torso = nn.Sequential(nn.Linear(16 * 4 * 4 + 2, 64), nn.ReLU())
        self.policy, self.value = nn.Linear(64, num_params), nn.Linear(64, 1)

    def forward(self, observation: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Maps leaves (N, ...), in the types of the space, to params (N, num_params) and value (N,)."""
        picture = observation["camera"].permute(0, 3, 1, 2).float() / 255.0
        hidden = self.torso(torch.cat((self.picture(picture), observation["compass"]), -1))
        return self.policy(hidden), self.value(hidden).squeeze(-1)


def make(spaces: Any, num_params: int) -> nn.Module:
    return MazeNetwork(num_params)
