"""The processes of `echelon bench rpc`: their shared memory, the observers, and the coordinator of `shm` and `tcp`.

The coordinator starts the agent and the observers, waits until the agent reports that a phase can begin, and waits for
the end of all. A process that fails or dies ends the run with its error; the run always removes its processes and
shared memory. An observer waits for the agent's reply, and before each phase for the coordinator; if the agent dies, it
sleeps until the coordinator ends it. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from echelon.bench.harness import Progress
from echelon.bench.processes import Processes, session_in
from echelon.bench.rpc import Raw, RpcSetting, check_port
from echelon.errors import RunError
from echelon.interrupts import Interrupts
from echelon.layout import Leaf, place, size_of, views_of
from echelon.transport.act_board import WORDS_PER_LINE, ActBoard, ActLayout, Seat
from echelon.transport.futex import Word
from echelon.transport.segments import create_segment, open_segment

if TYPE_CHECKING:
    from echelon.transport.remote_seat import RemoteSeat

Array = np.ndarray[Any, Any]
FILE = "results"
JOIN, WARM_UP, MEASURE = 1, 2, 3  # phases: observers take their seats, warm up, are measured
ANSWER_TIMEOUT_S = 1.0
LOOK_INTERVAL_S = 0.05
STALL_TIMEOUT_S = 150.0  # for third-party libraries; longer than their call timeout, so that its error is reported


class Results:
    """A segment that all processes share: the phase, the progress and the measurements of each.

    The coordinator creates it before it starts the others. Every value has one writer: the coordinator writes `phase`,
    the agent its row and the rounds, every observer its own row.
    """

    def __init__(self, folder: Path, setting: RpcSetting, *, create: bool = False) -> None:
        num_rounds = setting.num_observers * setting.num_measured  # at most: every request alone
        fields = place(
            (
                ("phase", (1,), np.int32),
                ("agent", (WORDS_PER_LINE,), np.int64),
                ("observers", (setting.num_observers, WORDS_PER_LINE), np.int64),
                ("observer_latency_ns", (setting.num_observers, setting.num_measured), np.int64),
                ("round_latency_ns", (num_rounds,), np.int64),
                ("round_size", (num_rounds,), np.int32),
            )
        )
        self.setting, path = setting, folder / FILE
        views = views_of(fields, create_segment(path, size_of(fields)) if create else open_segment(path))
        self.phase = Word(views["phase"])
        self.agent = views["agent"]  # [phase it is ready for, port it listens on, measured rounds]
        self.num_answered, self.start_ns, self.end_ns = (views["observers"][:, i] for i in range(3))
        self.observer_latency_ns = views["observer_latency_ns"]
        self.round_latency_ns, self.round_size = views["round_latency_ns"], views["round_size"]
        self._num_rounds = 0

    def may_begin(self, phase: int) -> bool:
        """Returns whether all processes are ready for `phase`, as reported by the agent."""
        return bool(self.agent[0] >= phase)

    def begin(self, phase: int) -> None:
        """Starts `phase` for all processes."""
        self.phase.value = phase
        self.phase.wake()

    def wait_for(self, phase: int, timeout_s: float) -> bool:
        """Sleeps until `phase` has begun, at most `timeout_s`; returns whether it has."""
        seen = self.phase.value
        if seen < phase:
            self.phase.wait(seen, timeout_s)
        return self.phase.value >= phase

    def record_round(self, size: int, first_ns: int) -> None:
        """Records a round of the agent: `size` requests, of which the first arrived at `first_ns`."""
        if self.phase.value == MEASURE:
            number = self._num_rounds
            self.round_latency_ns[number] = monotonic_ns() - first_ns
            self.round_size[number] = size
            self._num_rounds = self.agent[2] = number + 1

    @property
    def all_warm(self) -> bool:
        """Returns whether every observer has finished the warm-up."""
        return bool(self.num_answered.min() >= self.setting.num_warm_up)

    @property
    def all_ended(self) -> bool:
        return bool(self.end_ns.all())

    def raw(self, **extra: Any) -> Raw:
        """Returns the measurements; call it after every observer has ended."""
        num_rounds = int(self.agent[2])
        return Raw(
            agent_latency_s=self.round_latency_ns[:num_rounds] * 1e-9,
            agent_batch=self.round_size[:num_rounds].copy(),
            observer_latency_s=self.observer_latency_ns * 1e-9,
            elapsed_s=float(self.end_ns.max() - self.start_ns.min()) * 1e-9,
            extra=extra,
        )


class Observer:
    """Requests actions for random states, and measures the latency of every reply."""

    def __init__(self, setting: RpcSetting, results: Results, index: int) -> None:
        self.setting, self.results, self.index = setting, results, index
        self.rng = np.random.default_rng(index)
        self.num_asked, self.finished = 0, False

    @property
    def phase(self) -> int:
        """The phase of the next episode."""
        return WARM_UP if self.num_asked < self.setting.num_warm_up else MEASURE

    def observe(self, phase: int, state: Array, ask: Callable[[], object]) -> None:
        """Runs all episodes of `phase`."""
        while self.phase == phase and not self.finished:
            self.episode(state, ask)

    def episode(self, state: Array, ask: Callable[[], object]) -> None:
        """Runs the requests of one episode: `ask` sends `state`, new for each request, and waits for the action."""
        setting, results, index, first = self.setting, self.results, self.index, self.num_asked
        num_answered, random, latencies = results.num_answered, self.rng.random, []
        if first == setting.num_warm_up:
            results.start_ns[index] = monotonic_ns()
        for step in range(1, setting.steps + 1):
            random(dtype=np.float32, out=state)
            start_ns = monotonic_ns()
            ask()
            latencies.append(monotonic_ns() - start_ns)
            num_answered[index] = first + step
        self.num_asked = first + setting.steps
        start = first - setting.num_warm_up
        if start >= 0:
            results.observer_latency_ns[index, start : start + setting.steps] = latencies
        if self.num_asked == setting.num_warm_up + setting.num_measured:
            results.end_ns[index] = monotonic_ns()
            self.finished = True


def layout_of(setting: RpcSetting) -> ActLayout:
    """Returns the layout of the act board of a run: one state per observer, one agent."""
    state = Leaf("observation", (setting.num_inputs,), np.dtype(np.float32))
    return ActLayout((state,), Leaf("action", (), np.dtype(np.int64)), num_clients=setting.num_observers)


class SeatObserver:
    """The role of an observer with a seat on the agent's board: a step is one episode, or a wait for its phase."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.setting, self.folder = RpcSetting(**config["setting"]), Path(config["session"])
        self.results = Results(self.folder, self.setting)
        self.observer = Observer(self.setting, self.results, int(config["index"]))
        self.seat: Seat | RemoteSeat | None = None

    @property
    def finished(self) -> bool:
        return self.observer.finished

    def step(self, timeout_s: float) -> bool:
        if not self.results.wait_for(JOIN if self.seat is None else self.observer.phase, timeout_s):
            return False
        if self.seat is None:
            self.seat = self._take_seat()
        else:
            self.observer.episode(self.seat.observation[0], functools.partial(_ask, self.seat))
        return True

    def _take_seat(self) -> Seat | RemoteSeat:
        layout, index = layout_of(self.setting), self.observer.index
        if self.setting.transport == "shm":
            return Seat(ActBoard(self.folder, layout), index)
        from echelon.transport.remote_seat import RemoteSeat

        address = f"tcp://{self.setting.master_addr}:{self.results.agent[1]}"
        return RemoteSeat(address, layout, index)

    def close(self) -> None:
        if self.seat is not None:
            self.seat.leave()


def _ask(seat: Seat | RemoteSeat) -> None:
    seat.ask()
    while not seat.wait(ANSWER_TIMEOUT_S):
        pass


class BenchCoordinator:
    """Runs one measurement: starts the processes and drives them through the phases."""

    preload: tuple[str, ...] = (__name__,)  # modules imported in the fork server

    def __init__(self, setting: RpcSetting, session: Path, progress: Progress) -> None:
        self.setting, self.session, self.progress = setting, session, progress
        self.results = Results(session, setting, create=True)
        self.processes = Processes(session, self.preload)
        self.interrupts = Interrupts(signal.SIGINT)  # polled, as Python loses a KeyboardInterrupt raised in a finalizer

    def drive(self) -> None:
        """Starts all processes and drives them through the phases, until all have ended."""
        setting, results = self.setting, self.results
        ActBoard(self.session, layout_of(setting))  # created before any process joins it
        self.start("agent", "echelon.bench.rpc_agent:SeatAgent")
        for index in range(setting.num_observers):
            self.start(f"observer{index + 2}", f"{__name__}:SeatObserver", index=index)
        for phase in (JOIN, WARM_UP, MEASURE):
            self.until(functools.partial(results.may_begin, phase))
            results.begin(phase)
        self.until(lambda: not self.processes.working)

    def start(self, name: str, entry: str, **config: Any) -> None:
        self.processes.start(name, entry, {"setting": dataclasses.asdict(self.setting), **config})

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits for `condition`; raises the error of a process that ended early."""
        while not condition():
            self.interrupts.check()
            select.select(self.processes.engine.descriptors, [], [], LOOK_INTERVAL_S)
            self.processes.check()
            self.progress(int(self.results.num_answered.sum()), self.setting.num_requests)


def run(setting: RpcSetting, progress: Progress, kind: type[BenchCoordinator] = BenchCoordinator) -> Raw:
    """Measures `setting` with processes on this machine; `kind` drives them."""
    if setting.transport == "tcp":
        check_port(setting)
    with session_in(setting.shm_dir) as session:
        coordinator = kind(setting, session, progress)
        with coordinator.processes, coordinator.interrupts:
            coordinator.drive()
        return coordinator.results.raw()


class Standstill:
    """Raises RunError if no request is served for `STALL_TIMEOUT_S`: a third-party library may hang."""

    def __init__(self, library: str, results: Results) -> None:
        self.library, self.results = library, results
        self._seen, self._seen_s = -1, time.monotonic()

    def check(self) -> None:
        setting, answered = self.results.setting, int(self.results.num_answered.sum())
        if answered != self._seen:
            self._seen, self._seen_s = answered, time.monotonic()
        elif time.monotonic() - self._seen_s > STALL_TIMEOUT_S:
            raise RunError(
                f"{self.library} made no progress for {STALL_TIMEOUT_S:g} s, after {answered} of "
                f"{setting.num_requests} requests. Use fewer observers: lower --world_size (it is "
                f"{setting.world_size})."
            )
