"""The agent: the inference server of a training with the benchmark's policy behind it, which times every round.

It waits for requests, as the batch rule says: for all observers that asked the last time, at most `max_wait_us`. If an
observer stops or dies, the others go on without it; if the agent dies, the coordinator ends the run.
"""

from __future__ import annotations

from pathlib import Path
from time import monotonic_ns
from typing import Any

from echelon.bench.rpc.policy import AgentPolicy
from echelon.bench.rpc.results import JOIN, MEASURE, WARM_UP, Results, layout_of
from echelon.bench.rpc.setting import Setting
from echelon.servers.inference import InferenceServer
from echelon.transport.act_board import ActBoard
from echelon.transport.act_tcp import ActDoor
from echelon.transport.batcher import Batcher, BatchRule, Round
from echelon.transport.secret import secret_from_environment

SPIN_US = 200.0  # about what the observers of a small batch take for their next states


class PolicyAnswerer:
    """Lays down random actions of the policy, and writes down how long each round took."""

    def __init__(self, setting: Setting, board: ActBoard, results: Results) -> None:
        self.policy, self.results = AgentPolicy(setting), results
        self.states = board.observation[0][:, 0]  # (S, num_inputs)
        self.actions = board.action[:, 0]  # (S,)
        self.num_rounds = 0
        self.policy.choose(self.states)

    def answer(self, round: Round) -> int:
        # A whole round is read where it lies; one with gaps is gathered.
        where = round.span if round.whole else round.seats
        self.actions[where] = self.policy.choose(self.states[where])
        if self.results.phase.value == MEASURE:
            self._record(len(round.seats), monotonic_ns() - round.first_ns)
        return 0

    def _record(self, size: int, latency_ns: int) -> None:
        results, number = self.results, self.num_rounds
        results.round_latency_ns[number] = latency_ns
        results.round_size[number] = size
        self.num_rounds = results.agent[2] = number + 1

    def close(self) -> None:
        pass


class Agent:
    """The role: a step is one round."""

    def __init__(self, config: dict[str, Any]) -> None:
        setting, folder = Setting(**config["setting"]), Path(config["session"])
        self.results, self.board = Results(folder, setting), ActBoard(folder, layout_of(setting))
        self.finished = False
        rule = BatchRule(setting.batch, max_wait_us=setting.max_wait_us, spin_us=SPIN_US)
        self.batcher, door = Batcher(self.board, 0, rule), None
        if setting.transport == "tcp":
            address = f"tcp://{setting.master_addr}:{setting.master_port}"
            door = ActDoor(self.board, 0, address, secret_from_environment())
            self.results.agent[1] = int(door.address.rpartition(":")[2])
        self.server = InferenceServer(self.batcher, PolicyAnswerer(setting, self.board, self.results), door)
        self.results.agent[0] = JOIN

    def step(self, timeout_s: float) -> bool:
        worked = self.server.step(timeout_s)
        if not worked:
            self._pause()
        return worked

    def _pause(self) -> None:
        """Nobody asks: the next phase can begin, where all are ready for it; after the last it is over."""
        results = self.results
        ready = results.agent[0]
        if (ready == JOIN and self.board.incarnation.all()) or (ready == WARM_UP and results.all_warm):
            self.batcher.expect_all()  # so that batches are whole from the first on
            results.agent[0] = ready + 1
        self.finished = results.all_ended

    def close(self) -> None:
        self.server.close()
