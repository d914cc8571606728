"""`--transport ray`: the same workload over Ray actors, in a separate local Ray cluster.

The agent is an async actor: with `batch` a request awaits a future until all observers have sent one. Every observer is
an actor that calls the agent once per state. The driver, this process, is the coordinator; the measurements are in
memory that the actors share with it, as with the other transports.

An observer waits for its action, and the driver for the observers, until `Standstill` raises. If an actor dies, Ray
reports it and the run ends. `run` removes Ray's processes and its folder before it returns. Only the agent imports
torch.
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
OBJECT_STORE_BYTES = 100 * 2**20  # calls contain the requests, so the store is almost empty
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
        raise ConfigError(
            "Ray is already initialized in this process; the benchmark starts its own: call ray.shutdown() first."
        )
    with session_in(setting.shm_dir) as folder, local_ray(ray, setting, folder):
        try:
            return measure(ray, setting, folder, progress)
        except ray.exceptions.RayError as error:
            raise RunError(f"Ray ended the run: {error}") from error


@contextlib.contextmanager
def local_ray(ray: Any, setting: RpcSetting, folder: Path) -> Iterator[None]:
    """Starts a local Ray cluster for this run: one logical core per actor, no dashboard, no usage reports, no logs."""
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
    """Creates the actors and drives them through the phases."""
    on_gpu = setting.device != "cpu"
    if on_gpu and not ray.cluster_resources().get("GPU"):  # Ray would wait for one forever
        raise ConfigError(f"device={setting.device} does not exist: Ray sees no GPU. Use --device cpu.")
    results = Results(folder, setting, create=True)
    options = {"num_cpus": 1, "num_gpus": 1 if on_gpu else 0, "max_concurrency": setting.num_observers + 1}
    agent = ray.remote(AgentActor).options(**options).remote(setting, folder)
    make = ray.remote(ObserverActor).options(num_cpus=1).remote
    observers = [make(setting, folder, agent, index) for index in range(setting.num_observers)]
    standstill = Standstill("Ray", results)

    def wait(pending: list[Any]) -> None:
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=LOOK_INTERVAL_S)
            ray.get(done)  # raises the error of a failed call immediately
            progress(int(results.num_answered.sum()), setting.num_requests)
            standstill.check()

    wait([each.ready.remote() for each in (agent, *observers)])
    for phase in (WARM_UP, MEASURE):
        results.begin(phase)
        wait([each.observe.remote(phase) for each in observers])
    return results.raw(ray=ray.__version__)


class AgentActor:
    """Serves requests, all of a round together or each alone, on one event loop."""

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
