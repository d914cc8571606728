"""The gradient source: reads gradients from the slot ring, sums them, and counts their steps and episodes.

The learner that uses it is the gradient server. Gradients at weights that were published by a previous incarnation of
the learner are dropped and counted as dropped, because those weights are lost. So are gradients beyond the lag bound.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from echelon.algorithms.a3c import SHOWN
from echelon.config import TrainConfig
from echelon.errors import diverged
from echelon.roles.gradient_slots import GradientSchema
from echelon.roles.queue_source import RingSource
from echelon.roles.source import EndedEpisodes
from echelon.schema import GradientBatch
from echelon.transport.shared_memory import SlotRing

Array = np.ndarray[Any, Any]


class GradientStaging:
    """The sum of one batch of gradients, and the figures and counts of each."""

    def __init__(self, schema: GradientSchema, count: int, device: torch.device, learning_rate: float) -> None:
        self.device, self.learning_rate = device, learning_rate
        self.total = torch.zeros(schema.num_parameters, pin_memory=device.type == "cuda")
        self.sum: Array = self.total.numpy()
        self.values = np.zeros((count, len(SHOWN)), np.float32)
        self.statistics = torch.zeros(count, schema.num_statistics, dtype=torch.float64)
        self.version, self.env_steps = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.streams, self.episodes = [0] * count, [np.zeros((0, 3))] * count
        self.batch: GradientBatch

    def put(self, position: int, stream: int, views: dict[str, Array]) -> None:
        """Adds the gradient of one slot. Raises DivergedError if it is not finite."""
        gradient = views["gradient"]
        version = self.version[position] = views["version"][0]
        self._check(gradient, stream, int(version))
        if position == 0:
            self.sum[...] = gradient
        else:
            self.sum += gradient
        self.values[position] = views["values"]
        self.statistics[position] = torch.from_numpy(views["statistics"])
        self.env_steps[position] = views["env_steps"][0]
        self.streams[position] = stream
        self.episodes[position] = views["episodes"][: views["num_episodes"][0]].copy()

    def _check(self, gradient: Array, actor: int, version: int) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # fast check by one sum, which may itself overflow
            if np.isfinite(gradient.sum()):
                return
        bad = gradient[~np.isfinite(gradient)]
        if len(bad):
            what = f"{len(bad)} of the {len(gradient)} numbers of a gradient of actor {actor} are NaN or infinite"
            raise diverged(f"{what} (the first is {bad[0]}), at the weights of version {version}", self.learning_rate)

    def check(self) -> None:
        """Does nothing: `put` has checked every gradient."""

    def wait(self) -> None:
        """Does nothing: `move` copies synchronously."""

    def move(self) -> None:
        values = torch.from_numpy(self.values.mean(0))
        self.batch = GradientBatch(
            self.total.to(self.device), len(self.version), values.to(self.device), list(self.statistics)
        )


class GradientSource(RingSource[GradientStaging]):
    """Yields batches of gradients: in order of arrival, or an equal share of every actor if the lag is bounded."""

    def __init__(self, config: TrainConfig, schema: GradientSchema, ring: SlotRing, device: torch.device) -> None:
        self.schema, self.learning_rate = schema, config.optimizer.learning_rate
        self.first_version: int | None = None  # the first version that this incarnation of the learner published
        super().__init__(config, ring, device)
        self.prefetches = False  # summing is fast, and a gradient that is fetched later is newer

    def _make_staging(self) -> GradientStaging:
        return GradientStaging(self.schema, self.batch_size, self.device, self.learning_rate)

    def _counted(self, version: int) -> GradientStaging | None:
        if self.first_version is None:
            self.first_version = version
        return super()._counted(version)

    def _is_late(self, slot: dict[str, Array], version: int) -> bool:
        assert self.first_version is not None
        return bool(slot["version"][0] < self.first_version) or super()._is_late(slot, version)

    def _count(self, staging: GradientStaging, version: int) -> None:
        self._count_lag(version - staging.version, staging.env_steps)
        for stream, episodes in zip(staging.streams, staging.episodes, strict=True):
            if len(episodes):
                returns, lengths, envs = episodes.T
                self.counters.episodes += len(episodes)
                self.counters.note_episodes(returns.tolist(), lengths.astype(int).tolist())
                self.ended.append(EndedEpisodes(returns, lengths, np.full(len(episodes), stream), envs))
