"""Learning from replayed batches on a GPU as a CUDA graph.

A batch takes some hundred kernels of a few microseconds each, which take longer to launch than to run. Replay batches
have a fixed shape and a fixed address (`BatchMemory`), and so do all tensors that learning changes. The kernels are
therefore recorded once for each variant of a batch that the algorithm has, and launched together from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from echelon.algorithms.replayed import Replayed
from echelon.roles.update import Acknowledge, LocalUpdate, LossAccount, Tick, learn_once
from echelon.schema import TransitionBatch

WARM_UP = 4  # batches before the first recording, in which libraries select kernels and optimizers create their state


@dataclass(frozen=True, slots=True)
class Recording:
    """The CUDA graph of one variant, and the tensors that hold its results."""

    graph: torch.cuda.CUDAGraph
    names: tuple[str, ...]
    values: torch.Tensor
    priorities: torch.Tensor


class RecordedLearning:
    """Does the same as `learn_once`, by replaying a recorded graph."""

    def __init__(self, algorithm: Replayed, update: LocalUpdate) -> None:
        self.algorithm, self.update = algorithm, update
        self.recordings: dict[bool, Recording] = {}
        self.num_learned = 0
        self.pool: Any = None  # a memory pool shared by the recordings, as only one runs at a time

    def __call__(self, batch: Any, account: LossAccount, tick: Tick, acknowledge: Acknowledge | None) -> None:
        """Learns from one batch, which must be at the same address as all others."""
        self.num_learned += 1
        if self.num_learned <= WARM_UP:
            learn_once(self.algorithm, batch, self.update, account, tick, acknowledge)
            return
        variant = self.algorithm.variant
        if variant not in self.recordings:
            self.recordings[variant] = self._record(batch)
        recording = self.recordings[variant]
        recording.graph.replay()
        self.algorithm.num_learned += 1
        tick()
        account.note(recording.names, recording.values)
        if acknowledge is not None:
            acknowledge(batch.keys, recording.priorities)

    def _record(self, batch: TransitionBatch) -> Recording:
        """Records the kernels for a batch without running them."""
        graph, account, given = torch.cuda.CUDAGraph(), LossAccount(), list[torch.Tensor]()
        graph.register_generator_state(self.algorithm.generator)
        num_learned = self.algorithm.num_learned
        with torch.cuda.graph(graph, pool=self.pool):
            learn_once(self.algorithm, batch, self.update, account, acknowledge=lambda keys, found: given.append(found))
        self.algorithm.num_learned = num_learned
        self.pool = graph.pool()
        return Recording(graph, account.names, account.newest, given[0])
