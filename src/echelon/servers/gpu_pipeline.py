"""The GPU pipeline of one group of seats: buffers of fixed size, a stream, a random generator, CUDA graphs.

The seats of a round are contiguous in the buffers, whatever is between them on the board. The network runs on the next
larger *bucket* of seats: the padding is left over from earlier rounds, and its replies are not read. There is a graph
per bucket, from the filled buffers to the replies in page-locked memory, and one for the whole group that also fetches
the observations. A network that cannot be captured, because it reads tensor values on the CPU, is called without a
graph, which is reported once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.algorithms.model import Policy
from echelon.schema import space_choices, unflatten
from echelon.transport.act_board import ActBoard
from echelon.transport.batcher import Round

Array = np.ndarray[Any, Any]
Reporter = Callable[[str], None]
MAX_STRETCHES = 8  # copies a pipeline starts for one leaf of a round; the CPU gathers a round of more pieces
SPIN_S = 200e-6  # how long to spin before sleeping: most rounds take no longer on the GPU than a wake-up
NUM_WARM_UPS = 3  # calls before a capture, in which libraries choose kernels and allocate memory

cuda: Any = torch.cuda  # streams, events and the runtime have no types


def stretches_of(seats: Array) -> list[slice]:
    """Returns the runs of consecutive seats in `seats` (ascending)."""
    start, stop = int(seats[0]), int(seats[-1]) + 1
    if stop - start == len(seats):
        return [slice(start, stop)]
    cuts = np.flatnonzero(np.diff(seats) > 1) + 1
    return [slice(int(part[0]), int(part[-1]) + 1) for part in np.split(seats, cuts)]


def bucket_of(num_seats: int, most: int) -> int:
    """Returns the size of the smallest bucket for `num_seats`: a power of two, or `most`, the whole group."""
    return min(1 << (num_seats - 1).bit_length(), most)


@dataclass(slots=True)
class Timings:
    """The GPU time of each phase, in milliseconds, summed over `passes` of the pipelines."""

    passes: int = 0
    to_gpu_ms: float = 0.0
    forward_ms: float = 0.0  # the network, and drawing actions
    from_gpu_ms: float = 0.0


@dataclass(slots=True)
class PipelineContext:
    """The state that the pipelines of one server share."""

    policy: Policy
    board: ActBoard
    locked: bool  # the board's memory is page-locked
    report: Reporter
    captures: bool = True  # False once a capture of the network has failed
    timings: Timings = field(default_factory=Timings)


class _Key(NamedTuple):
    """The key of a graph: the number of seats, and whether the graph itself fetches the whole group."""

    bucket: int
    whole: bool


class Marks:
    """Timing events of a pass, including those inside a graph."""

    def __init__(self) -> None:
        self.begin, self.copied, self.computed, self.end = (
            cuda.Event(enable_timing=True, external=True) for _ in range(4)
        )

    def note(self, timings: Timings) -> None:
        timings.passes += 1
        timings.to_gpu_ms += self.begin.elapsed_time(self.copied)
        timings.forward_ms += self.copied.elapsed_time(self.computed)
        timings.from_gpu_ms += self.computed.elapsed_time(self.end)


class GpuPipeline:
    """Computes the replies of one group: it has a stream, buffers, a generator, and a graph per bucket."""

    def __init__(self, passes: PipelineContext, seats: range, seed: int) -> None:
        self.passes, self.model, self.board = passes, passes.policy.model, passes.board
        num_seats = self.num_seats = len(seats)
        self._seats, self.busy = np.asarray(seats), False
        self.marks: Marks | None = None
        device, board = self.model.device, self.board
        self.stream, self.done = cuda.Stream(device), cuda.Event(blocking=True)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._hosts = [torch.from_numpy(leaf) for leaf in (*board.observation, board.first)]
        self._inputs = [_like(host, num_seats, device=device) for host in self._hosts]
        for choices in space_choices(self.model.spaces.observation):  # unwritten rows are computed too: make them valid
            self._inputs[choices.leaf] += torch.as_tensor(choices.low, device=device)
        self._gathered: list[Tensor] = []  # page-locked, shaped like the inputs; allocated when first needed
        states = [torch.from_numpy(leaf[0]) for leaf in board.state]
        self._before = [_like(state, num_seats, pin_memory=True) for state in states]
        self._states = [_like(state, num_seats, device=device) for state in states]
        self._after = [_like(state, num_seats, pin_memory=True) for state in states]
        self._targets = [board.action, board.log_prob, *([board.value] if passes.policy.with_value else [])]
        self._replies = [_like(torch.from_numpy(leaf), num_seats, pin_memory=True) for leaf in self._targets]
        self._landed = [back.numpy() for back in (*self._replies, *self._after)]
        self._pool = cuda.graph_pool_handle()
        self._graphs: dict[_Key, Any] = {}  # None: called without a graph
        self.done.record(self.stream)

    def launch(self, round: Round) -> None:
        """Starts the computation of `round`; waits for the GPU only on the first use of a bucket."""
        assert not self.busy, "a group has at most one round in progress"
        self.busy = True
        size = len(round.seats)
        key = _Key(bucket_of(size, self.num_seats), self.passes.locked and size == self.num_seats)
        if key not in self._graphs:
            self._graphs[key] = self._capture(key)
        graph = self._graphs[key]
        for leaf, before in zip(self.board.state, self._before, strict=True):
            before.numpy()[:size] = leaf[(round.asked - 1) % 2, round.seats]
        with cuda.stream(self.stream):
            self._mark("begin")
            if not key.whole:
                self._fetch(round.seats)
            if graph is None:
                self._pass(key)
            else:
                graph.replay()
            self.done.record(self.stream)

    def _mark(self, point: str) -> None:
        if self.marks is not None:
            getattr(self.marks, point).record(self.stream)

    def _fetch(self, seats: Array) -> None:
        """Starts copying the observations of `seats` into the buffers, directly from the board if in few pieces."""
        sources, pieces = self._hosts, stretches_of(seats)
        if len(pieces) > MAX_STRETCHES:
            sources, pieces = self._gather(seats), [slice(0, len(seats))]
        offset = 0
        for piece in pieces:
            stop = offset + piece.stop - piece.start
            for source, buffer in zip(sources, self._inputs, strict=True):
                buffer[offset:stop].copy_(source[piece], non_blocking=True)
            offset = stop

    def _gather(self, seats: Array) -> list[Tensor]:
        self._gathered = self._gathered or [_like(host, self.num_seats, pin_memory=True) for host in self._hosts]
        for host, gathered in zip(self._hosts, self._gathered, strict=True):
            np.take(host.numpy(), seats, 0, gathered.numpy()[: len(seats)])
        return self._gathered

    def _pass(self, key: _Key) -> None:
        """Runs the network over the first seats of the buffers, and starts copying the replies back."""
        bucket = key.bucket
        if key.whole:
            self._fetch(self._seats)
        for before, buffer in zip(self._before, self._states, strict=True):
            buffer[:bucket].copy_(before[:bucket], non_blocking=True)
        self._mark("copied")
        *leaves, first = (buffer[:bucket].flatten(0, 1) for buffer in self._inputs)
        observation = unflatten(self.model.spaces.observation, iter(leaves))
        state = tuple(buffer[:bucket].flatten(0, 1) for buffer in self._states)
        chosen = self.passes.policy.act(observation, state, first, self._generator)
        self._mark("computed")
        results = [chosen.action, chosen.log_prob, *([chosen.value] if chosen.value is not None else []), *chosen.state]
        for result, back in zip(results, (*self._replies, *self._after), strict=True):
            back[:bucket].copy_(result.reshape(back[:bucket].shape), non_blocking=True)
        self._mark("end")

    def _capture(self, key: _Key) -> Any:
        """Returns a graph of the pass; None if the network cannot be captured."""
        if not self.passes.captures:
            return None
        with cuda.stream(self.stream), torch.backends.cudnn.flags(enabled=True, benchmark=True):
            for _ in range(NUM_WARM_UPS):
                self._pass(key)
            self.stream.synchronize()
            graph = cuda.CUDAGraph()
            graph.register_generator_state(self._generator)
            try:
                with cuda.graph(graph, self._pool, self.stream, capture_error_mode="thread_local"):
                    self._pass(key)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                self._generator = torch.Generator(self.model.device).manual_seed(self._generator.initial_seed())
                self.passes.captures = False
                self.passes.report(
                    "the network cannot be captured in a CUDA graph and is called without one, which is slower for "
                    f"small batches: {reason} Do not read tensor values on the CPU (.item(), if)."
                )
                return None
        return graph

    def land(self, round: Round) -> None:
        """Waits for the replies and writes them to the board."""
        end = time.perf_counter() + SPIN_S
        while not self.done.query():
            if time.perf_counter() > end:
                self.done.synchronize()  # sleeps
        board, seats, size = self.board, round.seats, len(round.seats)
        where = round.span if round.whole else seats
        replies, states = self._landed[: len(self._targets)], self._landed[len(self._targets) :]
        for target, reply in zip(self._targets, replies, strict=True):
            target[where] = reply[:size]
        for leaf, after in zip(board.state, states, strict=True):
            leaf[round.asked % 2, seats] = after[:size]
        if self.marks is not None:
            self.marks.note(self.passes.timings)
        self.busy = False


def _like(leaf: Tensor, num_seats: int, **options: Any) -> Tensor:
    """Returns zeros shaped like `leaf`, with `num_seats` as the leading dimension."""
    return torch.zeros((num_seats, *leaf.shape[1:]), dtype=leaf.dtype, **options)
