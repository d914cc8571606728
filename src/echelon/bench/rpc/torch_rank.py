"""One rank of `--transport torch-rpc`: the coordinator (0), the agent (1) or an observer, and the calls between them.

Every rank has PyTorch's public defaults: TensorPipe, and 16 threads that answer calls. The coordinator calls every
observer, and an observer calls the agent once per state. With `batch` the agent keeps a request's future until all
observers have asked; the call that completes the round chooses the actions and resolves them all. There is no RRef: one
in the arguments of every call costs about a third of the throughput.

Who waits: an observer for the agent's reply, at most `CALL_TIMEOUT_S`; the coordinator for the observers.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np
import torch
from torch.distributed import rpc
from torch.futures import Future

from echelon.bench.rpc.policy import AgentPolicy
from echelon.bench.rpc.results import MEASURE, WARM_UP, Results
from echelon.bench.rpc.setting import Setting
from echelon.bench.rpc.torch_rpc import failure_file, name_of
from echelon.engines.forkserver import die_with_parent, pack_failure
from echelon.engines.process import failure_of

CALL_TIMEOUT_S = 120.0
NUM_THREADS = 16  # PyTorch's default; none of them waits in a call, so they are enough for any number of observers


def work(rank: int, config: dict[str, Any], parent: int) -> None:
    """The life of one rank: joins the others; then the coordinator measures, and the others answer calls."""
    die_with_parent(parent)
    try:
        setting = Setting(**config["setting"])
        results = Results(Path(config["session"]), setting)
        torch.set_num_threads(1)
        if rank == 1:
            Here.agent = Agent(setting, results)
        elif rank > 1:
            Here.observer = Observer(setting, results, rank - 2)
        join(rank, setting, over_tcp=config["over_tcp"])
        if rank == 0:
            coordinate(setting, results)
        else:
            threading.Event().wait()  # calls are answered by threads of torch.distributed.rpc
    except BaseException as error:  # the last frame of the process: whatever ended it is told
        path = Path(config["session"]) / failure_file(rank)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(pack_failure(failure_of(error)))
        temporary.rename(path)
        os._exit(1)
    os._exit(0)  # torch.distributed.rpc is not shut down: see `torch_rpc`


def join(rank: int, setting: Setting, *, over_tcp: bool) -> None:
    """Becomes `rank` of the world; returns when all have come."""
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=NUM_THREADS,
        rpc_timeout=CALL_TIMEOUT_S,
        init_method=f"tcp://{setting.master_addr}:{setting.master_port}",
        _transports=["uv"] if over_tcp else None,
    )
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        name_of(rank), rank=rank, world_size=setting.world_size, rpc_backend_options=options
    )


def coordinate(setting: Setting, results: Results) -> None:
    """Has all observers go through both phases together."""
    for phase in (WARM_UP, MEASURE):
        results.begin(phase)
        observers = [name_of(rank) for rank in range(2, setting.world_size)]
        calls = [rpc.rpc_async(name, observe, args=(phase,), timeout=0) for name in observers]  # 0: without a limit
        torch.futures.wait_all(calls)


class Observer:
    """Asks the agent for an action for a random state, again and again, and times every answer."""

    def __init__(self, setting: Setting, results: Results, index: int) -> None:
        self.setting, self.results, self.index = setting, results, index
        self.rng = np.random.default_rng(index)
        self.state = torch.zeros(setting.num_inputs)

    def observe(self, phase: int) -> None:
        """All requests of one phase."""
        setting, results, index = self.setting, self.results, self.index
        ask = ask_in_batch if setting.batch else ask_alone
        random, memory, arguments = self.rng.random, self.state.numpy(), (index, self.state)
        start = 0 if phase == WARM_UP else setting.num_warm_up
        latencies = []
        results.start_ns[index] = monotonic_ns()
        for step in range(setting.num_warm_up if phase == WARM_UP else setting.num_measured):
            random(dtype=np.float32, out=memory)
            start_ns = monotonic_ns()
            rpc.rpc_sync("agent", ask, args=arguments)
            latencies.append(monotonic_ns() - start_ns)
            results.num_answered[index] = start + step + 1
        results.end_ns[index] = monotonic_ns()
        if phase == MEASURE:
            results.observer_latency_ns[index] = latencies


class Agent:
    """Answers the observers' calls, all of a round together or each alone; its threads take turns."""

    def __init__(self, setting: Setting, results: Results) -> None:
        self.results, self.policy = results, AgentPolicy(setting)
        self.lock = threading.Lock()
        self.states = np.zeros((setting.num_observers, setting.num_inputs), np.float32)
        self.waiting: dict[int, Future[int]] = {}  # by observer
        self.first_ns = 0
        self.policy.choose(self.states)
        self.policy.choose(self.states[:1])

    def ask_in_batch(self, index: int, state: torch.Tensor) -> Future[int]:
        arrived_ns = monotonic_ns()
        future: Future[int] = Future()
        with self.lock:
            if not self.waiting:
                self.first_ns = arrived_ns
            self.states[index] = state.numpy()
            self.waiting[index] = future
            if len(self.waiting) < len(self.states):
                return future
            actions = self.policy.choose(self.states).tolist()
            self._record(monotonic_ns() - self.first_ns, len(self.states))
            answered, self.waiting = self.waiting, {}
        for asker, waiting in answered.items():
            waiting.set_result(actions[asker])
        return future

    def ask_alone(self, state: torch.Tensor) -> int:
        arrived_ns = monotonic_ns()
        with self.lock:
            action = int(self.policy.choose(state.numpy()[None])[0])
            self._record(monotonic_ns() - arrived_ns, 1)
        return action

    def _record(self, latency_ns: int, size: int) -> None:
        results = self.results
        if results.phase.value == MEASURE:
            number = results.agent[2]
            results.round_latency_ns[number] = latency_ns
            results.round_size[number] = size
            results.agent[2] = number + 1


class Here:
    """What calls find in this process: a call names a function, and a function has no other way to it."""

    agent: Agent
    observer: Observer


def observe(phase: int) -> None:
    """Called by the coordinator in an observer."""
    Here.observer.observe(phase)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def ask_in_batch(index: int, state: torch.Tensor) -> Future[int]:
    """Called by an observer in the agent."""
    return Here.agent.ask_in_batch(index, state)


def ask_alone(index: int, state: torch.Tensor) -> int:
    """Called by an observer in the agent."""
    return Here.agent.ask_alone(state)
