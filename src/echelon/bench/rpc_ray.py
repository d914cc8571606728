"""`--transport ray`: the same workload over Ray actors, in a Ray of its own on this machine.

The agent is an async actor: with `batch` a request awaits a future until all observers have asked. Every observer is an
actor that calls the agent once per state. The driver, this process, is the coordinator; what the actors measure lies in
memory that they share with it, as with the other transports.

Who waits: an observer for its action, the driver for the observers, until there is a standstill. If an actor dies, Ray
says so and the run is over. Ray, its processes and its folder are gone when `run` returns. Needs no torch outside the
agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from echelon.bench.harness import Progress
from echelon.bench.processes import session_in
from echelon.bench.rpc import Raw, RpcSetting
from echelon.bench.rpc_processes import MEASURE, WARM_UP, Observer, Results, Standstill
from echelon.errors import ConfigError, RunError

Array = np.ndarray[Any, Any]
LOOK_INTERVAL_S = 0.5
OBJECT_STORE_BYTES = 100 * 2**20  # requests travel inside the calls, so almost nothing lies there
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def run(setting: RpcSetting, progress: Progress) -> Raw:
    """Measures `setting` over Ray actors."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "transport=ray needs Ray, which is not installed: pip install 'echelon[ray]'. The other transports need "
            "nothing more."
        ) from error
    if ray.is_initialized():
        raise ConfigError("this process has a Ray already; the benchmark starts its own: call ray.shutdown() first.")
    with session_in(setting.shm_dir) as folder, local_ray(ray, setting, folder):
        try:
            return measure(ray, setting, folder, progress)
        except ray.exceptions.RayError as error:
            raise RunError(f"Ray ended the run: {error}") from error


@contextlib.contextmanager
def local_ray(ray: Any, setting: RpcSetting, folder: Path) -> Iterator[None]:
    """A Ray that is only this run's: one core per actor in its books, no dashboard, no reports, quiet."""
    before = {name: os.environ.get(name) for name in QUIET}
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
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def measure(ray: Any, setting: RpcSetting, folder: Path, progress: Progress) -> Raw:
    """Makes the actors and has them go through the phases together."""
    on_gpu = setting.device != "cpu"
    if on_gpu and not ray.cluster_resources().get("GPU"):  # it would wait for one forever
        raise ConfigError(f"device={setting.device} is not there: Ray sees no GPU. Use --device cpu.")
    results = Results(folder, setting, create=True)
    options = {"num_cpus": 1, "num_gpus": 1 if on_gpu else 0, "max_concurrency": setting.num_observers + 1}
    agent = ray.remote(AgentActor).options(**options).remote(setting, folder)
    make = ray.remote(ObserverActor).options(num_cpus=1).remote
    observers = [make(setting, folder, agent, index) for index in range(setting.num_observers)]
    standstill = Standstill("Ray", results)

    def wait(pending: list[Any]) -> None:
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=LOOK_INTERVAL_S)
            ray.get(done)  # a call that failed ends the run now, not after the others
            progress(int(results.num_answered.sum()), setting.num_requests)
            standstill.check()

    wait([each.ready.remote() for each in (agent, *observers)])
    for phase in (WARM_UP, MEASURE):
        results.begin(phase)
        wait([each.observe.remote(phase) for each in observers])
    return results.raw(ray=ray.__version__)


class AgentActor:
    """Answers requests, all of a round together or each alone, on one event loop."""

    def __init__(self, setting: RpcSetting, folder: Path) -> None:
        from echelon.bench.rpc_agent import CallAgent

        self.agent, self.batch = CallAgent(setting, Results(folder, setting)), setting.batch

    async def ready(self) -> None: ...

    async def ask(self, index: int, state: Array) -> int:
        if not self.batch:
            return self.agent.answer(state)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.agent.join_round(index, state, future)
        return await future


class ObserverActor:
    """Calls the agent once per state."""

    def __init__(self, setting: RpcSetting, folder: Path, agent: Any, index: int) -> None:
        import ray

        self.observer = Observer(setting, Results(folder, setting), index)
        state = self.state = np.zeros(setting.num_inputs, np.float32)
        get, ask = ray.get, agent.ask.remote
        self.ask = lambda: get(ask(index, state))

    def ready(self) -> None: ...

    def observe(self, phase: int) -> None:
        self.observer.observe(phase, self.state, self.ask)
