"""Act requests on a GPU: static shapes, CUDA graphs, observations fetched directly from the board.

The board's memory is page-locked, so the GPU reads observations where the clients wrote them. Each group of seats has a
*pipeline* (`gpu_pipeline.py`) with its own stream: one group is copied while another computes, and the CPU gathers or
settles a third. A round is split by group.

Weights are updated between rounds, in place, so that the addresses in the graphs stay valid: on the GPU, the copy waits
for the rounds in progress, and every later round waits for the copy.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.algorithms.model import Model, Policy
from echelon.servers.gpu_pipeline import SPIN_S, GpuPipeline, Marks, PipelineContext, Reporter, Timings, cuda
from echelon.servers.inference import ActSource, InferenceServer
from echelon.transport.act_board import ActBoard
from echelon.transport.batcher import Batcher, Round
from echelon.transport.shared_memory import WeightsBoard

Array = np.ndarray[Any, Any]
DOZE_S = 50e-6  # how long a server sleeps between checks of the GPU


def cut(round: Round, groups: Sequence[range]) -> dict[int, Round]:
    """Splits `round` by group, leaving out groups without a part; `groups` ascend and cover all its seats."""
    bounds = [*np.searchsorted(round.seats, [seats.start for seats in groups]).tolist(), len(round.seats)]
    parts = {}
    for group, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if stop - start == len(round.seats):
            return {group: round}
        if stop > start:
            parts[group] = Round(round.seats[start:stop], round.asked[start:stop], round.first_ns)
    return parts


@dataclass(frozen=True, slots=True)
class Flight:
    """A round of one group in progress on the GPU, and the version of its weights."""

    pipeline: GpuPipeline
    round: Round
    version: int

    @property
    def landed(self) -> bool:
        """Whether the replies have arrived."""
        return bool(self.pipeline.done.query())


class CudaAnswerer:
    """Computes the replies of rounds with a model on a GPU.

    `launch` starts a round and `land` finishes it; between the two, other groups can be launched. A group has at most
    one round in progress (see `free`). `answer` does both.
    """

    def __init__(
        self,
        model: Model,
        board: ActBoard,
        weights: WeightsBoard,
        seed: int,
        *,
        groups: Sequence[range],
        precision: str = "float32",
        report: Reporter = lambda text: print(text, file=sys.stderr),
        with_value: bool = True,
        noise_correlation: float = 0.0,
    ) -> None:
        """`groups` are the seats of each group (`Batcher.groups`); a round has no other seats.

        `with_value=False` leaves the value out of the replies.
        """
        assert model.device.type == "cuda", f"the model is on {model.device}"
        torch.set_float32_matmul_precision("high")  # TF32, as in the learner; convolutions use it anyway
        model.network.eval()  # no dropout in a user's network while acting
        model.network.requires_grad_(False)
        self.model, self.board, self.groups = model, board, groups
        locked = page_lock(board.memory, report)
        mixed = precision == "bfloat16"
        policy = Policy(model, with_value=with_value, mixed=mixed, noise_correlation=noise_correlation)
        self._passes = PipelineContext(policy, board, locked, report)
        self._weights = _Weights(model, weights)
        self._pipelines = [GpuPipeline(self._passes, seats, seed + i) for i, seats in enumerate(groups)]
        cuda.synchronize(model.device)  # the pipelines' streams need the results of the default stream

    def time_passes(self) -> Timings:
        """Starts to measure the GPU time of each phase; call it before the first round."""
        for pipeline in self._pipelines:
            pipeline.marks = Marks()
        return self._passes.timings

    def answer(self, round: Round) -> int:
        """Writes the replies to `round` to the board; returns the version of their weights."""
        flights = self.launch(round)
        for flight in flights:
            self.land(flight)
        return flights[0].version

    def free(self, round: Round) -> bool:
        """Whether no group of `round` has another round in progress."""
        return not any(self._pipelines[group].busy for group in cut(round, self.groups))

    @torch.inference_mode()
    def launch(self, round: Round) -> list[Flight]:
        """Starts the computation of `round` with the newest weights; returns a flight for each of its groups."""
        self._weights.refresh(self._pipelines)
        flights = []
        for group, part in cut(round, self.groups).items():
            self._pipelines[group].launch(part)
            flights.append(Flight(self._pipelines[group], part, self._weights.version))
        return flights

    def land(self, flight: Flight) -> None:
        """Waits for the replies of `flight` and writes them to the board."""
        flight.pipeline.land(flight.round)

    def close(self) -> None:
        cuda.synchronize(self.model.device)
        if self._passes.locked:
            cuda.check_error(int(cuda.cudart().cudaHostUnregister(self.board.memory.ctypes.data)))
            self._passes.locked = False


class CudaServer(InferenceServer):
    """An inference server that gathers and launches a round of one group while that of another is in progress.

    It polls for requests and for finished rounds. At first it spins, because most of them arrive within the time that
    it takes to fall asleep and wake up. Then it sleeps on the board, and checks the GPU in between if a round is in
    progress.
    """

    def __init__(self, batcher: Batcher, answerer: CudaAnswerer, listener: ActSource | None = None) -> None:
        super().__init__(batcher, answerer, listener)
        self._pipelines = answerer
        self._flights: deque[Flight] = deque()

    def step(self, timeout_s: float) -> bool:
        """Launches a round or lands one; with none in progress, waits at most `timeout_s` for requests."""
        start, waited_s, under_way = time.perf_counter(), self.wait_s, bool(self._flights)
        round = self._look(timeout_s)
        if under_way:
            self.wait_s = waited_s  # it waited for the GPU
            self.forward_s += time.perf_counter() - start
        if round is not None:
            while not self._pipelines.free(round):
                self._land()
            self._launch(round)
        elif under_way:
            self._land()
        return under_way or round is not None

    def _look(self, timeout_s: float) -> Round | None:
        """Returns the next round; None once the oldest flight has landed or, without flights, after `timeout_s`."""
        flights, start = self._flights, time.perf_counter()
        spin_s = SPIN_S if flights else min(SPIN_S, timeout_s)
        while not (flights and flights[0].landed):
            spinning = time.perf_counter() - start < spin_s
            round = self._take(0.0 if spinning else DOZE_S if flights else timeout_s)
            if round is not None or not (spinning or flights):
                return round
        return None

    def _launch(self, round: Round) -> None:
        start = time.perf_counter()
        self.batcher.claim(round)  # only now: earlier flights may belong to previous occupants of these seats
        self._flights += self._pipelines.launch(round)
        self.forward_s += time.perf_counter() - start

    def _land(self) -> None:
        start = time.perf_counter()
        flight = self._flights.popleft()
        self._pipelines.land(flight)
        self.forward_s += time.perf_counter() - start
        self._settle(flight.round, flight.version)


def page_lock(memory: Array, report: Reporter) -> bool:
    """Page-locks `memory` so that the GPU can read it; returns False if that fails, which only makes copies slower."""
    code = int(cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if code:
        report(
            f"the {memory.nbytes / 2**20:.1f} MiB of the act board could not be page-locked (CUDA error {code}): "
            "observations reach the GPU by an extra copy. Raise the limit of locked memory (ulimit -l)."
        )
    return code == 0


class _Weights:
    """Updates a model's weights on the GPU from the weights board: one read, then one copy per part."""

    def __init__(self, model: Model, board: WeightsBoard) -> None:
        self.board, self.version = board, 0
        self._staging: Array = torch.zeros(model.nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        self._copied = cuda.Event()
        self._pairs: list[tuple[Tensor, Tensor]] = []
        offset = 0
        tensors = [tensor for flat in model.flats() for tensor in flat.tensors()]
        for tensor, part in zip(tensors, model.parts(), strict=True):
            raw = self._staging[offset : offset + part.nbytes]
            self._pairs.append((tensor, torch.from_numpy(raw.view(part.dtype)).view(tensor.shape)))
            offset += part.nbytes

    def refresh(self, pipelines: Sequence[GpuPipeline]) -> None:
        """Copies newer weights, if there are any, after the rounds in progress and before every later one."""
        if self.board.version <= self.version:
            return
        self._copied.synchronize()  # the last copy has left the staging memory
        self.version = self.board.read(self._staging)
        stream = pipelines[0].stream
        for pipeline in pipelines:
            stream.wait_event(pipeline.done)
        with cuda.stream(stream):
            for tensor, staged in self._pairs:
                tensor.copy_(staged, non_blocking=True)
        self._copied.record(stream)
        for pipeline in pipelines:
            pipeline.stream.wait_event(self._copied)
