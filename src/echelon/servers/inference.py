"""The inference server: answers the act requests of many actors with one forward pass.

It waits for: questions on the board (`Batcher.next`, rung by `Seat.ask`). It wakes: the actors that asked, by settling
the round. Weights are looked at after a round was taken, so no answer is older than what was published when its
question was put: an actor that asks only after it was admitted keeps the bound on the lag. If the server dies in the
middle of an answer, its successor finds the questions on the board and the recurrent state as it was before them.

Shapes: n seats of a round, K environments of a seat.
"""

from __future__ import annotations

import os
import time
from typing import Any, Protocol

import numpy as np
import torch

from echelon.algorithms.model import Mirror, Model, Policy
from echelon.schema import unflatten
from echelon.transport.act_board import ActBoard
from echelon.transport.batcher import Batcher, Round
from echelon.transport.shared_memory import WeightsBoard

Array = np.ndarray[Any, Any]


class Answerer(Protocol):
    """What lays down the replies to a round."""

    def answer(self, round: Round) -> int:
        """Writes the replies of the seats that asked, and of no other; returns the version of the weights."""

    def close(self) -> None: ...


class ActSource(Protocol):
    """Where questions come in that do not lie on the board yet, from other machines."""

    @property
    def num_refused(self) -> int:
        """Frames and handshakes that were refused."""

    def next(self, batcher: Batcher, timeout_s: float) -> Round | None:
        """The next round, of the board and of the listener, waiting at most `timeout_s` for one."""

    def reply(self, round: Round) -> None:
        """Sends the answers of a settled round to those who do not read them off the board."""

    def close(self) -> None: ...


class PolicyAnswerer:
    """Answers on the CPU, with a copy of the policy that follows the weights board.

    The observations are read where they lie. Where only some seats of the span asked, but at least half, the whole
    span is computed and only theirs is written: the others may still be reading their last answer.
    """

    def __init__(
        self, model: Model, board: ActBoard, weights: WeightsBoard, seed: int, *, with_value: bool = True
    ) -> None:
        """`with_value=False` leaves the value out of the replies, where nobody reads it."""
        self.mirror, self.weights, self.policy = Mirror(model), weights, Policy(model, with_value=with_value)
        self.model, self.board = model, board
        self.rng = torch.Generator().manual_seed(seed)
        self._observation = [torch.from_numpy(leaf) for leaf in board.observation]
        self._first = torch.from_numpy(board.first)

    def answer(self, round: Round) -> int:
        version, board, rows = self.mirror.follow(self.weights), self.board, self._rows(round)
        leaves = iter([leaf[rows].flatten(0, 1) for leaf in self._observation])
        observation = unflatten(self.model.spaces.observation, leaves)
        state = tuple(torch.from_numpy(leaf[(round.asked - 1) % 2, round.seats]).flatten(0, 1) for leaf in board.state)
        chosen = self.policy.act(observation, state, self._first[rows].flatten(), self.rng)
        self._reply(round, rows, board.action, chosen.action)
        self._reply(round, rows, board.log_prob, chosen.log_prob)
        if chosen.value is not None:
            self._reply(round, rows, board.value, chosen.value)
        for leaf, after in zip(board.state, chosen.state, strict=True):
            leaf[round.asked % 2, round.seats] = after.numpy().reshape(-1, *leaf.shape[2:])
        return version

    def close(self) -> None:
        pass

    def _rows(self, round: Round) -> slice | Array:
        """What is computed: the span where it lies, or the seats gathered from it."""
        span = round.span
        if round.whole:
            return span
        # A seat that never asked may hold what no network can read; a recurrent state is gathered anyway.
        dense = not self.board.state and 2 * len(round.seats) >= span.stop - span.start
        return span if dense and self.board.asked[span].all() else round.seats

    def _reply(self, round: Round, rows: slice | Array, target: Array, tensor: torch.Tensor) -> None:
        """Lays down the replies of the seats that asked."""
        reply = tensor.numpy().reshape(-1, *target.shape[1:])
        if isinstance(rows, slice) and not round.whole:
            target[round.seats] = reply[round.seats - rows.start]
        else:
            target[rows] = reply


class InferenceServer:
    """One round a step: gathers questions, has them answered, shows the replies."""

    def __init__(self, batcher: Batcher, answerer: Answerer, listener: ActSource | None = None) -> None:
        self.batcher, self.answerer, self.listener = batcher, answerer, listener
        self.num_requests = self.num_rounds = self.num_rows = 0
        self.wait_s = self.forward_s = self.transfer_s = 0.0

    def step(self, timeout_s: float) -> bool:
        """Answers one round; waits at most `timeout_s` for it."""
        round = self._take(timeout_s)
        if round is None:
            return False
        start = time.perf_counter()
        self.batcher.claim(round)
        version = self.answerer.answer(round)
        self.forward_s += time.perf_counter() - start
        self._settle(round, version)
        return True

    def _take(self, timeout_s: float) -> Round | None:
        """The next round, waiting at most `timeout_s` for one; to be claimed before its state is read."""
        start = time.perf_counter()
        batcher = self.batcher
        round = self._next(0.0) if batcher.rule.spin_us else None
        spin_until = start + batcher.rule.spin_us * 1e-6
        while round is None and time.perf_counter() < spin_until:
            os.sched_yield()
            round = self._next(0.0)
        round = round or self._next(timeout_s)
        self.wait_s += time.perf_counter() - start
        return round

    def _next(self, timeout_s: float) -> Round | None:
        return self.batcher.next(timeout_s) if self.listener is None else self.listener.next(self.batcher, timeout_s)

    def _settle(self, round: Round, version: int) -> None:
        """Shows the replies to those who asked."""
        start = time.perf_counter()
        self.batcher.settle(round, version)
        if self.listener is not None:
            self.listener.reply(round)
        self.transfer_s += time.perf_counter() - start
        self.num_requests += len(round.seats)
        self.num_rounds += 1
        self.num_rows += len(round.seats) * self.batcher.board.layout.rows

    def close(self) -> None:
        self.answerer.close()
        if self.listener is not None:
            self.listener.close()
