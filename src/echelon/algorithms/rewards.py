"""What rewards go through before they are learned from."""

from __future__ import annotations

from typing import Any

import torch

from echelon.schema import Batch

EPSILON = 1e-8


class RewardScale:
    """Clips rewards, or divides them by the running deviation of the discounted return of every environment.

    The discounted return runs on across batches, so the scale is kept per lane of the run; it is applied before the
    batch's own returns are taken in.
    """

    def __init__(self, *, clip: float, normalize: bool, discount: float) -> None:
        self.clip, self.normalize, self.discount = clip, normalize, discount
        self.returns = torch.zeros(0, dtype=torch.float64)
        self.count, self.mean, self.squares = 0.0, 0.0, 0.0

    def __call__(self, reward_TB: torch.Tensor) -> torch.Tensor:
        if self.normalize:
            reward_TB = (reward_TB / self.deviation).clamp(-10.0, 10.0)
        if self.clip > 0:
            reward_TB = reward_TB.clamp(-self.clip, self.clip)
        return reward_TB

    @property
    def deviation(self) -> float:
        return (self.squares / self.count + EPSILON) ** 0.5 if self.count > 1 else 1.0

    def observe(self, batch: Batch) -> None:
        """Takes the returns of `batch` into the running deviation."""
        if not self.normalize:
            return
        for columns in _in_order(batch.lanes.tolist()):
            self._observe(batch, torch.tensor(columns))

    def _observe(self, batch: Batch, columns: torch.Tensor) -> None:
        """Takes in columns of different lanes."""
        lanes = batch.lanes.cpu()[columns]
        if int(lanes.max()) >= self.returns.numel():
            grown = torch.zeros(int(lanes.max()) + 1, dtype=torch.float64)
            grown[: self.returns.numel()] = self.returns
            self.returns = grown
        reward_TB, valid_TB = batch.reward.cpu()[:, columns].double(), batch.valid.cpu()[:, columns]
        first_TB = batch.first.cpu()[:-1, columns]  # also set where an environment or its actor began anew
        running_B, seen = self.returns[lanes], []
        for reward_B, valid_B, first_B in zip(reward_TB, valid_TB, first_TB, strict=True):
            running_B = running_B.masked_fill(first_B, 0.0) * self.discount + reward_B
            seen.append(running_B[valid_B])
        self.returns[lanes] = running_B
        self._merge(torch.cat(seen))

    def _merge(self, values: torch.Tensor) -> None:
        """Chan et al.'s update of count, mean and sum of squares by a batch of values."""
        if values.numel() == 0:
            return
        count, mean = float(values.numel()), float(values.mean())
        squares = float(((values - mean) ** 2).sum())
        total, delta = self.count + count, mean - self.mean
        self.squares += squares + delta * delta * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    def state_dict(self) -> dict[str, Any]:
        return {"returns": self.returns, "count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.returns, self.count = state["returns"], state["count"]
        self.mean, self.squares = state["mean"], state["squares"]


def _in_order(lanes: list[int]) -> list[list[int]]:
    """Columns in rounds in which every lane occurs once: a batch may hold several trajectories of one, oldest first."""
    rounds: list[list[int]] = []
    seen: dict[int, int] = {}
    for column, lane in enumerate(lanes):
        turn = seen[lane] = seen.get(lane, -1) + 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(column)
    return rounds
