"""What the rules share that learn from trajectories in passes: scaled rewards, shuffled lanes, running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from echelon.algorithms.model import Model
from echelon.algorithms.peers import ALONE, Peers
from echelon.algorithms.protocol import Group
from echelon.algorithms.rewards import RewardScale
from echelon.config import ImpalaConfig, PpoConfig
from echelon.errors import ConfigError
from echelon.schema import Batch, map_tree


class Passes:
    """Passes over the lanes of a batch, in an order drawn anew for each."""

    def __init__(self, config: ImpalaConfig | PpoConfig, model: Model, seed: int, peers: Peers = ALONE) -> None:
        self.model, self.peers = model, peers
        self.groups: dict[str, Group] = {}
        self.num_passes, self.num_pieces = config.epochs, config.minibatches
        self.generator = torch.Generator().manual_seed(seed)
        self.rewards = RewardScale(clip=config.reward_clip, normalize=config.normalize_reward, discount=config.discount)

    def pieces(self, rows: int, lanes: int, device: torch.device) -> Iterator[torch.Tensor]:
        """Which of its `rows` times `lanes` sequences, counted row by row, each minibatch holds, pass after pass.

        The order is drawn over the sequences of all learners, whose lanes lie side by side: what one of them holds of a
        minibatch is what falls on its own lanes.
        """
        rank, width = self.peers.rank, lanes * self.peers.size
        if rows * width < self.num_pieces:
            raise ConfigError(
                f"algorithm.minibatches={self.num_pieces} exceeds the {rows * width} sequences of a batch. Lower it, "
                "or raise --envs-per-actor."
            )
        for _ in range(self.num_passes):
            order = torch.randperm(rows * width, generator=self.generator)
            if self.peers.size == 1:
                yield from order.to(device).tensor_split(self.num_pieces)
                continue
            for piece in order.tensor_split(self.num_pieces):
                row, lane = piece // width, piece % width - rank * lanes
                yield (row * lanes + lane)[(lane >= 0) & (lane < lanes)].to(device)

    def priorities(self, minibatch: Any) -> None:
        """Trajectories are learned from once, in the order they came."""

    def finish(self, batch: Batch) -> None:
        if self.peers.size == 1:
            self.rewards.observe(batch)
        elif self.rewards.normalize:
            mine = torch.tensor(self.rewards.moments(batch), dtype=torch.float64)
            for count, mean, squares in self.peers.gather(mine).tolist():
                self.rewards.merge(count, mean, squares)
        self.model.network.update_normalizer(map_tree(lambda x: x[:-1], batch.observation), batch.valid)

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": self.rewards.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rewards.load_state_dict(state["rewards"])
        self.generator.set_state(state["generator"])
