"""One turn of a library: what the caller measures, the same way whoever carries its calls."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from echelon.bench.world.setting import LEAST_CALLS, Setting

WARM_UP_SHARE = 0.2  # of a figure's time, before it is measured
UNITS = {
    "small round trip p50": "us",
    "small round trip p95": "us",
    "small round trip p99": "us",
    "large echo": "GB/s",
    "small calls": "calls/s",
}


class Future(Protocol):
    """A call under way."""

    def wait(self) -> Any: ...


class Caller(Protocol):
    """Calls a function of the other process that returns its argument."""

    def call(self, tensor: torch.Tensor) -> Any: ...

    def begin(self, tensor: torch.Tensor) -> Future: ...


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def measure(setting: Setting, caller: Caller) -> dict[str, float]:
    """The figures of one turn, by name."""
    torch.set_num_threads(1)
    small, large = (torch.rand(nbytes // 4) for nbytes in (setting.small, setting.large))
    for tensor in (small, large):
        if not torch.equal(caller.call(tensor), tensor):
            raise AssertionError("an echo is not what was sent")
    trips = _times(setting, lambda: caller.call(small))
    echoes = _times(setting, lambda: caller.call(large))
    p50, p95, p99 = np.percentile(trips, (50, 95, 99)).tolist()
    values = (p50 * 1e6, p95 * 1e6, p99 * 1e6, 2 * setting.large / float(np.median(echoes)) / 1e9)
    return dict(zip(UNITS, (*values, _rate(setting, caller, small)), strict=True))


def _times(setting: Setting, work: Callable[[], object]) -> list[float]:
    """How long each call took, one after another."""
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


def _rate(setting: Setting, caller: Caller, tensor: torch.Tensor) -> float:
    """Calls answered per second, with `in_flight` of them under way all the time."""
    under_way: deque[Future] = deque(caller.begin(tensor) for _ in range(setting.in_flight))
    begin, count = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - begin) < setting.seconds or count < LEAST_CALLS:
        under_way.popleft().wait()
        under_way.append(caller.begin(tensor))
        count += 1
    for future in under_way:
        future.wait()
    return count / elapsed_s
