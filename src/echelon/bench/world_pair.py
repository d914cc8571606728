"""The two processes of one turn of `echelon bench world`: a caller that measures, and a callee that serves its calls.

`python -m echelon.bench.world_pair LIBRARY NAME WORDS`; the caller prints its measurements as JSON. Both libraries,
Echelon and torch.distributed.rpc with its public defaults, are measured in the same way.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from echelon.bench.world import ADDRESS, LEAVE_S, NAMES, UNITS, WorldSetting
from echelon.engines.forkserver import die_with_parent

KEY = "echo"
BARRIER_S, CALL_S = 600.0, 60.0
WARM_UP_SHARE = 0.2  # share of a figure's duration before the measurement
LEAST_CALLS = 10  # minimum per figure and turn


class AnyFuture(Protocol):
    """A call in flight."""

    def wait(self) -> Any: ...


class Caller(Protocol):
    """Calls a function of the other process that returns its argument."""

    def call(self, tensor: torch.Tensor) -> Any: ...

    def begin(self, tensor: torch.Tensor) -> AnyFuture: ...


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def measure(setting: WorldSetting, caller: Caller) -> dict[str, float]:
    """Returns the figures of one turn, by name."""
    small, large = (torch.rand(nbytes // 4) for nbytes in (setting.small, setting.large))
    for tensor in (small, large):
        if not torch.equal(caller.call(tensor), tensor):
            raise AssertionError("an echo differs from its tensor")
    trips = _times(setting, lambda: caller.call(small))
    echoes = _times(setting, lambda: caller.call(large))
    p50, p95, p99 = np.percentile(trips, (50, 95, 99)).tolist()
    values = (p50 * 1e6, p95 * 1e6, p99 * 1e6, 2 * setting.large / float(np.median(echoes)) / 1e9)
    return dict(zip(UNITS, (*values, _rate(setting, caller, small)), strict=True))


def _times(setting: WorldSetting, work: Callable[[], object]) -> list[float]:
    """Returns the durations of sequential calls."""
    times: list[float] = []
    begin = time.perf_counter()
    warm, end = begin + WARM_UP_SHARE * setting.seconds, begin + (1 + WARM_UP_SHARE) * setting.seconds
    while True:
        start = time.perf_counter()
        work()
        now = time.perf_counter()
        if start >= warm:
            times.append(now - start)
        if now >= end and len(times) >= LEAST_CALLS:
            return times


def _rate(setting: WorldSetting, caller: Caller, tensor: torch.Tensor) -> float:
    """Returns the calls per second, with `in_flight` calls in flight all the time."""
    under_way: deque[AnyFuture] = deque(caller.begin(tensor) for _ in range(setting.in_flight))
    begin, count = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - begin) < setting.seconds or count < LEAST_CALLS:
        under_way.popleft().wait()
        under_way.append(caller.begin(tensor))
        count += 1
    for future in under_way:
        future.wait()
    return count / elapsed_s


def attend_world(name: str, folder: str, setting: WorldSetting) -> dict[str, float]:
    """Runs caller or callee with Echelon; the callee waits in a barrier while its threads serve calls."""
    from echelon.world import RpcGroup, World
    from echelon.world.watch import NONCE

    class WorldCaller:
        def __init__(self, group: RpcGroup) -> None:
            self._group = group

        def call(self, tensor: torch.Tensor) -> Any:
            return self._group.registered_sync(KEY, (tensor,))

        def begin(self, tensor: torch.Tensor) -> AnyFuture:
            return self._group.registered_async(KEY, (tensor,))

    rank = NAMES.index(name)
    if setting.transport == "local":
        world = World(name, rank, world_size=2)
    else:  # as on two hosts
        world = World(name, rank, world_size=2, address=(Path(folder) / ADDRESS).read_text())
        (Path(world._info.folder) / NONCE).unlink()  # without it, the other process does not detect shared memory
    try:
        group = world.create_rpc_group("bench", NAMES)
        if name == NAMES[1]:
            group.register(KEY, echo)
        group.barrier()
        figures = measure(setting, WorldCaller(group)) if name == NAMES[0] else {}
        group.barrier(BARRIER_S)
    except BaseException:
        world.end(f"{name!r} failed")
        raise
    world.stop()
    return figures


def attend_torch(name: str, folder: str, setting: WorldSetting) -> dict[str, float]:
    """Runs caller or callee with torch.distributed.rpc; the callee runs until it is killed."""
    from torch.distributed import rpc

    class TorchCaller:
        def call(self, tensor: torch.Tensor) -> Any:
            return rpc.rpc_sync(NAMES[1], echo, args=(tensor,))

        def begin(self, tensor: torch.Tensor) -> AnyFuture:
            future: AnyFuture = rpc.rpc_async(NAMES[1], echo, args=(tensor,))
            return future

    warnings.filterwarnings(
        "ignore", message="You are using a Backend"
    )  # torch.distributed.rpc triggers this warning itself
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=CALL_S, init_method=f"file://{folder}/meet")
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        name, rank=NAMES.index(name), world_size=2, rpc_backend_options=options
    )
    if name == NAMES[1]:
        threading.Event().wait()  # threads of torch.distributed.rpc serve the calls
    return measure(setting, TorchCaller())


LIBRARIES = {"echelon": attend_world, "torch-rpc": attend_torch}


def main(library: str, name: str, words: str) -> None:
    """Runs one of the two processes."""
    config = json.loads(words)
    die_with_parent(config["parent"])
    torch.set_num_threads(1)
    figures = LIBRARIES[library](name, config["folder"], WorldSetting(**config["setting"]))
    print(json.dumps(figures), flush=True)
    if not LEAVE_S[library]:
        os._exit(0)  # its shutdown sometimes fails


if __name__ == "__main__":
    main(*sys.argv[1:])
