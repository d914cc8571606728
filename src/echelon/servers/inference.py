"""The inference server: answers the act requests of many actors with one forward pass.

It waits for requests on the board (`Batcher.next`, woken by `Seat.ask`). It wakes the actors of a round by settling the
round. It reads the weights after it has taken a round, so a reply never uses weights older than those published when
the request was made: an actor that requests actions only after it was admitted keeps the bound on the lag. If the
server dies in the middle of a round, its successor finds the requests on the board, and the recurrent state from before
them.

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
    """Computes the replies to a round."""

    def answer(self, round: Round) -> int:
        """Writes the replies of the round's seats, and of no others; returns the version of the weights."""

    def close(self) -> None: ...


class ActSource(Protocol):
    """A source of requests from other hosts, which are not on the board yet."""

    @property
    def num_refused(self) -> int:
        """Number of frames and handshakes that were refused."""

    def next(self, batcher: Batcher, timeout_s: float) -> Round | None:
        """Returns the next round, from the board and the listener; waits at most `timeout_s` for one."""

    def reply(self, round: Round) -> None:
        """Sends the replies of a settled round to the actors of other hosts."""

    def close(self) -> None: ...


class PolicyAnswerer:
    """Computes replies on the CPU, with a copy of the policy that follows the weights board.

    Observations are read in place. If at least half of the seats of the span belong to the round, the whole span is
    computed, but only replies of the round are written: the actors of other seats may still read their last reply.
    """

    def __init__(
        self,
        model: Model,
        board: ActBoard,
        weights: WeightsBoard,
        seed: int,
        *,
        with_value: bool = True,
        noise_correlation: float = 0.0,
    ) -> None:
        """`with_value=False` leaves the value out of the replies."""
        self.mirror, self.weights, self.model, self.board = Mirror(model), weights, model, board
        self.policy = Policy(model, with_value=with_value, noise_correlation=noise_correlation)
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
        """Returns the rows to compute: the whole span in place, or only the seats of the round, gathered."""
        span = round.span
        if round.whole:
            return span
        # A seat without any request so far may hold an invalid observation; recurrent states are gathered anyway.
        dense = not self.board.state and 2 * len(round.seats) >= span.stop - span.start
        return span if dense and self.board.asked[span].all() else round.seats

    def _reply(self, round: Round, rows: slice | Array, target: Array, tensor: torch.Tensor) -> None:
        """Writes the replies of the round's seats to the board."""
        reply = tensor.numpy().reshape(-1, *target.shape[1:])
        if isinstance(rows, slice) and not round.whole:
            target[round.seats] = reply[round.seats - rows.start]
        else:
            target[rows] = reply


class InferenceServer:
    """Serves one round per step: takes the requests, computes the replies, wakes the actors."""

    def __init__(self, batcher: Batcher, answerer: Answerer, listener: ActSource | None = None) -> None:
        self.batcher, self.answerer, self.listener = batcher, answerer, listener
        self.num_requests = self.num_rounds = self.num_rows = 0
        self.wait_s = self.forward_s = self.transfer_s = 0.0

    def step(self, timeout_s: float) -> bool:
        """Serves one round; waits at most `timeout_s` for it."""
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
        """Returns the next round; waits at most `timeout_s` for one. Claim it before reading its recurrent state."""
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
        """Makes the replies visible to their actors."""
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
