"""What rewards go through before they are learned from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from echelon.schema import Batch

Array = np.ndarray[Any, Any]
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
            self._observe(batch, np.array(columns))

    def moments(self, batch: Batch) -> list[float]:
        """Those of the returns of `batch` alone, which are not taken into the deviation."""
        past, (self.count, self.mean, self.squares) = (self.count, self.mean, self.squares), (0.0, 0.0, 0.0)
        self.observe(batch)
        found, (self.count, self.mean, self.squares) = [self.count, self.mean, self.squares], past
        return found

    def _observe(self, batch: Batch, columns: Array) -> None:
        """Takes in columns of different lanes."""
        lanes = batch.lanes.cpu().numpy()[columns]
        if int(lanes.max()) >= self.returns.numel():
            grown = torch.zeros(int(lanes.max()) + 1, dtype=torch.float64)
            grown[: self.returns.numel()] = self.returns
            self.returns = grown
        # Small arrays, a row at a time: numpy's operations cost a third of torch's here.
        reward_TB = batch.reward.cpu().numpy()[:, columns].astype(np.float64)
        valid_TB = batch.valid.cpu().numpy()[:, columns]
        goes_on_TB = ~batch.first.cpu().numpy()[:-1, columns]  # False also where an environment or its actor began anew
        decay_TB = goes_on_TB * self.discount
        returns = self.returns.numpy()
        running_B = returns[lanes]
        for decay_B, row_B in zip(decay_TB, reward_TB, strict=True):
            row_B += decay_B * running_B  # the rewards become the returns
            running_B = row_B
        returns[lanes] = running_B
        self._take(reward_TB[valid_TB])

    def _take(self, values: Array) -> None:
        if values.size:
            mean = float(values.mean())
            self.merge(float(values.size), mean, float(((values - mean) ** 2).sum()))

    def merge(self, count: float, mean: float, squares: float) -> None:
        """Takes in the moments of other returns (Chan et al., 1979)."""
        if count == 0:
            return
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
