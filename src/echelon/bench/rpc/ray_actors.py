"""`--transport ray`: the same workload over Ray actors, in a Ray of its own on this machine.

The agent is an async actor: with `batch` a request awaits a future until all observers have asked; the request that
completes the round chooses the actions and resolves them all. Every observer is an actor that calls the agent once per
state. The driver, this process, is the coordinator.

Who waits: an observer for its action, the driver for the observers; it asks the agent for its progress, and gives up
when there is none for `STALL_TIMEOUT_S`. If an actor dies, Ray says so and the run is over. Ray, its processes and its
folder are gone when `run` returns. Needs no torch outside the agent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any

import numpy as np

from echelon.bench.rpc.setting import Progress, Raw, Setting
from echelon.errors import ConfigError, RunError
from echelon.transport.session import create_session

Array = np.ndarray[Any, Any]
STALL_TIMEOUT_S = 120.0
LOOK_INTERVAL_S = 0.5
OBJECT_STORE_BYTES = 100 * 2**20  # requests travel inside the calls, so almost nothing lies there
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def run(setting: Setting, progress: Progress) -> Raw:
    """Measures `setting` over Ray actors."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "transport=ray needs Ray, which is not installed: pip install 'echelon[ray]'. The other transports need "
            "nothing more."
        ) from error
    with local_ray(ray, setting):
        try:
            return Coordinator(ray, setting, progress).measure()
        except ray.exceptions.RayError as error:
            raise RunError(f"Ray ended the run: {error}") from error


@contextmanager
def local_ray(ray: Any, setting: Setting) -> Iterator[None]:
    """A Ray that is only this run's: one core per actor in its books, no dashboard, no reports, quiet."""
    if ray.is_initialized():
        raise ConfigError("this process has a Ray already; the benchmark starts its own: call ray.shutdown() first.")
    before = {name: os.environ.get(name) for name in QUIET}
    folder = create_session(setting.shm_dir)  # what a killed run leaves there, the next one removes
    os.environ.update(QUIET)
    try:
        ray.init(
            address="local",
            num_cpus=setting.num_observers + 1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(folder),
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class Coordinator:
    """One run: makes the actors, has them go through the phases together, gathers what they measured."""

    def __init__(self, ray: Any, setting: Setting, progress: Progress) -> None:
        self.ray, self.setting, self.progress = ray, setting, progress
        on_gpu = setting.device != "cpu"
        if on_gpu and not ray.cluster_resources().get("GPU"):  # it would wait for one forever
            raise ConfigError(f"device={setting.device} is not there: Ray sees no GPU. Use --device cpu.")
        agent_options = {"num_cpus": 1, "num_gpus": 1 if on_gpu else 0, "max_concurrency": setting.num_observers + 1}
        self.agent = ray.remote(Agent).options(**agent_options).remote(setting)
        observer = ray.remote(Observer).options(num_cpus=1)
        self.observers = [observer.remote(setting, self.agent, index) for index in range(setting.num_observers)]

    def measure(self) -> Raw:
        setting = self.setting
        self._wait([each.ready.remote() for each in (self.agent, *self.observers)])
        self._wait([each.observe.remote(setting.num_warm_up) for each in self.observers])
        self.ray.get(self.agent.begin.remote(), timeout=STALL_TIMEOUT_S)
        observed = self._wait([each.observe.remote(setting.num_measured) for each in self.observers])
        rounds = self.ray.get(self.agent.rounds.remote(), timeout=STALL_TIMEOUT_S)  # (latency in ns, size)
        return Raw(
            agent_latency_s=rounds[:, 0] * 1e-9,
            agent_batch=rounds[:, 1],
            observer_latency_s=np.stack([each["latency_ns"] for each in observed]) * 1e-9,
            elapsed_s=(max(each["end_ns"] for each in observed) - min(each["start_ns"] for each in observed)) * 1e-9,
            extra={"ray": self.ray.__version__},
        )

    def _wait(self, calls: list[Any]) -> list[Any]:
        """The results of `calls`, telling the progress meanwhile."""
        pending, answered, seen_s = list(calls), -1, time.monotonic()
        while pending:
            done, pending = self.ray.wait(pending, num_returns=len(pending), timeout=LOOK_INTERVAL_S)
            self.ray.get(done)  # a call that failed ends the run now, not after the others
            now = self.ray.get(self.agent.num_answered.remote(), timeout=STALL_TIMEOUT_S)
            self.progress(now, self.setting.num_requests)
            if done or now != answered:
                answered, seen_s = now, time.monotonic()
            elif time.monotonic() - seen_s > STALL_TIMEOUT_S:
                raise RunError(
                    f"Ray made no progress for {STALL_TIMEOUT_S:g} s, after {now} of {self.setting.num_requests} "
                    f"requests. Fewer observers may do: lower --world_size (it is {self.setting.world_size})."
                )
        results: list[Any] = self.ray.get(calls)
        return results


class Agent:
    """The actor that answers requests, all of a round together or each alone.

    Its calls run on one event loop, so nothing of this needs a lock.
    """

    def __init__(self, setting: Setting) -> None:
        from echelon.bench.rpc.policy import AgentPolicy

        self.policy, self.batch = AgentPolicy(setting), setting.batch
        self.states = np.zeros((setting.num_observers, setting.num_inputs), np.float32)
        self.waiting: dict[int, asyncio.Future[int]] = {}  # by observer
        self.first_ns = self.answered = 0
        self.measured: list[tuple[int, int]] = []  # rounds: latency in ns, size; as many as the run has
        self.measuring = False
        self.policy.choose(self.states if self.batch else self.states[:1])

    async def ready(self) -> None: ...

    async def begin(self) -> None:
        self.measuring = True

    async def num_answered(self) -> int:
        return self.answered

    async def rounds(self) -> Array:
        return np.array(self.measured, np.int64)

    async def ask(self, index: int, state: Array) -> int:
        arrived_ns = monotonic_ns()
        if not self.batch:
            action = int(self.policy.choose(state[None])[0])
            self._record(arrived_ns, 1)
            return action
        if not self.waiting:
            self.first_ns = arrived_ns
        self.states[index] = state
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.waiting[index] = future
        if len(self.waiting) == len(self.states):
            actions = self.policy.choose(self.states).tolist()
            self._record(self.first_ns, len(self.states))
            for asker, waiting in self.waiting.items():
                waiting.set_result(actions[asker])
            self.waiting = {}
        return await future

    def _record(self, first_ns: int, size: int) -> None:
        if self.measuring:
            self.measured.append((monotonic_ns() - first_ns, size))
        self.answered += size


class Observer:
    """The actor that asks the agent for an action for a random state, again and again, and times every answer."""

    def __init__(self, setting: Setting, agent: Any, index: int) -> None:
        self.agent, self.index = agent, index
        self.rng = np.random.default_rng(index)
        self.state = np.zeros(setting.num_inputs, np.float32)

    def ready(self) -> None: ...

    def observe(self, num_requests: int) -> dict[str, Any]:
        import ray

        ask, get, index, state, random = self.agent.ask.remote, ray.get, self.index, self.state, self.rng.random
        latencies = np.zeros(num_requests, np.int64)
        began_ns = monotonic_ns()
        for step in range(num_requests):
            random(dtype=np.float32, out=state)
            start_ns = monotonic_ns()
            get(ask(index, state))
            latencies[step] = monotonic_ns() - start_ns
        return {"latency_ns": latencies, "start_ns": began_ns, "end_ns": monotonic_ns()}
