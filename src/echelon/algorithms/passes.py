"""What the rules share that learn from trajectories in passes: scaled rewards, shuffled lanes, running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from echelon.algorithms.model import Model
from echelon.algorithms.protocol import Group
from echelon.algorithms.rewards import RewardScale
from echelon.config import ImpalaConfig, PpoConfig
from echelon.errors import ConfigError
from echelon.schema import Batch, map_tree


class Passes:
    """Passes over the lanes of a batch, in an order drawn anew for each."""

    def __init__(self, config: ImpalaConfig | PpoConfig, model: Model, seed: int) -> None:
        self.model = model
        self.groups: dict[str, Group] = {}
        self.num_passes, self.num_pieces = config.epochs, config.minibatches
        self.generator = torch.Generator().manual_seed(seed)
        self.rewards = RewardScale(clip=config.reward_clip, normalize=config.normalize_reward, discount=config.discount)

    def pieces(self, lanes: int, device: torch.device) -> Iterator[torch.Tensor]:
        """Which lanes each minibatch holds, pass after pass."""
        if lanes < self.num_pieces:
            raise ConfigError(
                f"algorithm.minibatches={self.num_pieces} exceeds the {lanes} sequences of a batch. Lower it, or raise "
                "--envs-per-actor."
            )
        for _ in range(self.num_passes):
            order = torch.randperm(lanes, generator=self.generator).to(device)
            yield from order.tensor_split(self.num_pieces)

    def priorities(self, minibatch: Any) -> None:
        """Trajectories are learned from once, in the order they came."""

    def finish(self, batch: Batch) -> None:
        self.rewards.observe(batch)
        self.model.network.update_normalizer(map_tree(lambda x: x[:-1], batch.observation), batch.valid)

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": self.rewards.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rewards.load_state_dict(state["rewards"])
        self.generator.set_state(state["generator"])
