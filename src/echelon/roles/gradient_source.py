"""The gradient source: gradients out of the slot ring, added up, with everything counted on the way.

The learner that takes from it is the gradient server. Gradients of weights that were lost with a learner before this
one belong to no weights any more; they are dropped and counted, as are those beyond the lag bound.
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
from echelon.schema import GradientBatch
from echelon.transport.shared_memory import SlotRing

Array = np.ndarray[Any, Any]


class GradientStaging:
    """The sum of one batch of gradients, and what came with each."""

    def __init__(self, schema: GradientSchema, count: int, device: torch.device, learning_rate: float) -> None:
        self.device, self.learning_rate = device, learning_rate
        self.total = torch.zeros(schema.num_parameters, pin_memory=device.type == "cuda")
        self.sum: Array = self.total.numpy()
        self.values = np.zeros((count, len(SHOWN)), np.float32)
        self.statistics = torch.zeros(count, schema.num_statistics, dtype=torch.float64)
        self.version, self.env_steps = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.episodes: list[Array] = [np.zeros((0, 2))] * count
        self.batch: GradientBatch

    def put(self, position: int, stream: int, views: dict[str, Array]) -> None:
        """Adds the gradient of one slot, which must be finite."""
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
        self.episodes[position] = views["episodes"][: views["num_episodes"][0]].copy()

    def _check(self, gradient: Array, actor: int, version: int) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # one look at all of it; a sum may overflow
            if np.isfinite(gradient.sum()):
                return
        bad = gradient[~np.isfinite(gradient)]
        if len(bad):
            what = f"{len(bad)} of the {len(gradient)} numbers of a gradient of actor {actor} are {bad[0]} or the like"
            raise diverged(f"{what}, at the weights of version {version}", self.learning_rate)

    def check(self) -> None:
        """Done, gradient by gradient."""

    def wait(self) -> None:
        """Copies to a device are made at once."""

    def move(self) -> None:
        values = torch.from_numpy(self.values.mean(0))
        self.batch = GradientBatch(
            self.total.to(self.device), len(self.version), values.to(self.device), list(self.statistics)
        )


class GradientSource(RingSource[GradientStaging]):
    """Batches of gradients as they come, or with a bound on the lag a share from every actor."""

    def __init__(self, config: TrainConfig, schema: GradientSchema, ring: SlotRing, device: torch.device) -> None:
        self.schema, self.learning_rate = schema, config.optimizer.learning_rate
        self.first_version: int | None = None  # that this learner published
        super().__init__(config, ring, device)
        self.prefetches = False  # gradients are soon added up, and better taken late than early

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
        for episodes in staging.episodes:
            for value, length in episodes.tolist():
                self.counters.episodes += 1
                self.counters.note_episode(value, int(length))
