"""One observer: asks the agent for an action for a random state, again and again, and times every answer.

It waits for the agent's answer, and before each phase for the coordinator. If the agent dies, it sleeps until the
coordinator ends it. Needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from echelon.bench.rpc.results import JOIN, MEASURE, WARM_UP, Results, layout_of
from echelon.bench.rpc.setting import Setting
from echelon.transport.act_board import ActBoard, Seat

if TYPE_CHECKING:
    from echelon.transport.act_tcp import RemoteSeat

ANSWER_TIMEOUT_S = 1.0


class Observer:
    """The role: a step is one episode, or a wait for the phase it belongs to."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.setting = Setting(**config["setting"])
        self.index, self.folder = int(config["index"]), Path(config["session"])
        self.results = Results(self.folder, self.setting)
        self.rng = np.random.default_rng(self.index)
        self.finished = False
        self.num_asked = 0
        self.seat: Seat | RemoteSeat | None = None

    def step(self, timeout_s: float) -> bool:
        setting, results = self.setting, self.results
        warming_up = self.num_asked < setting.num_warm_up
        phase = JOIN if self.seat is None else WARM_UP if warming_up else MEASURE
        if not results.wait_for(phase, timeout_s):
            return False
        if self.seat is None:
            self.seat = self._take_seat()
            return True
        if self.num_asked == setting.num_warm_up:
            results.start_ns[self.index] = monotonic_ns()
        latencies = self._episode(self.seat)
        if not warming_up:
            start = self.num_asked - setting.num_warm_up
            results.observer_latency_ns[self.index, start : start + setting.steps] = latencies
        self.num_asked += setting.steps
        if self.num_asked == setting.num_warm_up + setting.num_measured:
            results.end_ns[self.index] = monotonic_ns()
            self.finished = True
        return True

    def _episode(self, seat: Seat | RemoteSeat) -> list[int]:
        """The latency of each request of one episode, in nanoseconds."""
        state, random = seat.observation[0], self.rng.random
        num_answered, index, num_asked = self.results.num_answered, self.index, self.num_asked
        latencies = []
        for step in range(1, self.setting.steps + 1):
            random(dtype=np.float32, out=state)
            start_ns = monotonic_ns()
            seat.ask()
            while not seat.wait(ANSWER_TIMEOUT_S):
                pass
            latencies.append(monotonic_ns() - start_ns)
            num_answered[index] = num_asked + step
        return latencies

    def _take_seat(self) -> Seat | RemoteSeat:
        layout = layout_of(self.setting)
        if self.setting.transport == "shm":
            return Seat(ActBoard(self.folder, layout), self.index)
        from echelon.transport.act_tcp import RemoteSeat
        from echelon.transport.secret import secret_from_environment

        address = f"tcp://{self.setting.master_addr}:{self.results.agent[1]}"
        return RemoteSeat(address, layout, self.index, secret=secret_from_environment())

    def close(self) -> None:
        if self.seat is not None:
            self.seat.leave()
