"""Learning on a GPU as a CUDA graph, for algorithms that run the same operations for every batch.

A batch takes some hundred kernels of a few microseconds each, which take longer to launch than to run. Batches have a
fixed shape and a fixed address (`BatchMemory`), and so do all tensors that learning changes. The kernels are therefore
recorded once for each variant of a batch that the algorithm has, and launched together from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from echelon.algorithms.protocol import StaticAlgorithm
from echelon.roles.loss_account import LossAccount
from echelon.roles.update import Acknowledge, AnyBatch, LocalUpdate, Tick, learn_once

WARM_UP = 4  # batches before the first recording, in which libraries select kernels and optimizers create their state


@dataclass(frozen=True, slots=True)
class Recording:
    """The CUDA graph of one variant, and the tensors that hold its results."""

    graph: torch.cuda.CUDAGraph
    names: tuple[str, ...]
    values: torch.Tensor
    priorities: torch.Tensor | None


class RecordedLearning:
    """Does the same as `learn_once`, by replaying a recorded graph."""

    def __init__(self, algorithm: StaticAlgorithm, update: LocalUpdate) -> None:
        self.algorithm, self.update = algorithm, update
        self.recordings: dict[bool, Recording] = {}
        self.num_learned = 0
        self.scale = update.scale  # of the learning rates, which are constants of the recordings
        self.pool: Any = None  # a memory pool shared by the recordings, as only one runs at a time

    def __call__(self, batch: Any, account: LossAccount, tick: Tick, acknowledge: Acknowledge | None) -> None:
        """Learns from one batch, which must be at the same address as all others."""
        self.num_learned += 1
        if self.num_learned <= WARM_UP:
            learn_once(self.algorithm, batch, self.update, account, tick, acknowledge)
            return
        if self.update.scale != self.scale:
            self.scale = self.update.scale
            self.recordings.clear()
        variant = self.algorithm.variant
        if variant in self.recordings:
            self.algorithm.count_batch()
        else:
            self.recordings[variant] = self._record(batch)
        recording = self.recordings[variant]
        recording.graph.replay()
        tick()
        account.note(recording.names, recording.values)
        if acknowledge is not None and recording.priorities is not None:
            acknowledge(batch.keys, recording.priorities)

    def _record(self, batch: AnyBatch) -> Recording:
        """Records the kernels for a batch without running them; the algorithm counts the batch."""
        graph, account, given = torch.cuda.CUDAGraph(), LossAccount(), list[torch.Tensor]()
        if self.algorithm.generator.device.type == "cuda":
            graph.register_generator_state(self.algorithm.generator)
        with torch.cuda.graph(graph, pool=self.pool):
            learn_once(self.algorithm, batch, self.update, account, acknowledge=lambda _, found: given.append(found))
        self.pool = graph.pool()
        return Recording(graph, account.names, account.newest, given[0] if given else None)
