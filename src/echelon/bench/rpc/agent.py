"""The agent: answers the observers' requests, all of a round together, and times every round.

It waits for requests, as the batch rule says: for all observers that asked the last time, at most `max_wait_us`. If an
observer stops or dies, the others go on without it; if the agent dies, the coordinator ends the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from echelon.bench.rpc.policy import AgentPolicy
from echelon.bench.rpc.results import JOIN, MEASURE, WARM_UP, Results, layout_of
from echelon.bench.rpc.setting import Setting
from echelon.transport.act_board import ActBoard
from echelon.transport.batcher import Batcher, BatchRule, Round
from echelon.transport.curve import secret_from_environment

if TYPE_CHECKING:
    from echelon.transport.act_tcp import ActDoor

SPIN_NS = 200_000  # about what the observers of a small batch take for their next states


class Agent:
    """The role: a step is one round."""

    def __init__(self, config: dict[str, Any]) -> None:
        setting = Setting(**config["setting"])
        folder = Path(config["session"])
        self.results = Results(folder, setting)
        self.board = ActBoard(folder, layout_of(setting))
        self.policy = AgentPolicy(setting)
        self.states = self.board.observation[0][:, 0]  # (S, num_inputs)
        self.actions = self.board.action[:, 0]  # (S,)
        self.finished = False
        self.num_rounds = 0
        self.batcher = Batcher(self.board, 0, BatchRule(setting.batch, max_wait_us=setting.max_wait_us))
        self.door: ActDoor | None = None
        self.next: Callable[[float], Round | None] = self.batcher.next
        if setting.transport == "tcp":
            from echelon.transport.act_tcp import ActDoor

            address = f"tcp://{setting.master_addr}:{setting.master_port}"
            door = self.door = ActDoor(self.board, 0, address, secret_from_environment())
            self.next = lambda timeout_s: door.next(self.batcher, timeout_s)
            self.results.agent[1] = int(door.address.rpartition(":")[2])
        self.policy.choose(self.states)
        self.results.agent[0] = JOIN

    def _next_round(self, timeout_s: float) -> Round | None:
        """Looks for a while, giving way to observers on this core; only then sleeps, as being woken takes long."""
        spin_until_ns = monotonic_ns() + SPIN_NS
        round = self.next(0.0)
        while round is None and monotonic_ns() < spin_until_ns:
            os.sched_yield()
            round = self.next(0.0)
        return self.next(timeout_s) if round is None else round

    def step(self, timeout_s: float) -> bool:
        round = self._next_round(timeout_s)
        if round is None:
            self._pause()
            return False
        # A whole round is read where it lies; one with gaps is gathered.
        where = round.span if round.whole else round.seats
        self.actions[where] = self.policy.choose(self.states[where])
        chosen_ns = monotonic_ns()
        self.batcher.settle(round, 0)
        if self.door is not None:
            self.door.reply(round)
        if self.results.phase.value == MEASURE:
            self._record(len(round.seats), chosen_ns - round.first_ns)
        return True

    def _pause(self) -> None:
        """Nobody asks: the next phase can begin, where all are ready for it; after the last it is over."""
        results = self.results
        ready = results.agent[0]
        if (ready == JOIN and self.board.incarnation.all()) or (ready == WARM_UP and results.all_warm):
            self.batcher.expect_all()  # so that batches are whole from the first on
            results.agent[0] = ready + 1
        self.finished = results.all_ended

    def _record(self, size: int, latency_ns: int) -> None:
        results, number = self.results, self.num_rounds
        results.round_latency_ns[number] = latency_ns
        results.round_size[number] = size
        self.num_rounds = results.agent[2] = number + 1

    def close(self) -> None:
        if self.door is not None:
            self.door.close()
