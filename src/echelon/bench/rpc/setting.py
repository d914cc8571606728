"""What one run of the RPC benchmark is asked for, and what it brings back. Needs no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from echelon.errors import ConfigError

Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]  # (requests answered so far, all of them), the warm-up included

TRANSPORTS = {
    "shm": "echelon.bench.rpc.coordinator:run",
    "tcp": "echelon.bench.rpc.coordinator:run",
    "torch-rpc": "echelon.bench.rpc.torch_rpc:run",
    "ray": "echelon.bench.rpc.ray_actors:run",
}
NUM_WARM_UP_EPISODES = 1  # before the measured ones, in every backend alike; their samples are left out


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: a coordinator, an agent, and `world_size - 2` observers that ask it for actions."""

    world_size: int = 10
    master_addr: str = "127.0.0.1"
    master_port: str = "29501"
    batch: bool = True  # the agent answers all observers together; False: each by itself
    state_size: str = "10-20-10"
    nlayers: int = 5
    out_features: int = 10
    output_file_path: str = "benchmark_report.json"
    episodes: int = 10
    steps: int = 100  # requests of one observer in one episode
    transport: str = "shm"
    device: str = "cpu"
    max_wait_us: float = 50_000.0  # the longest a batch waits for an observer; shm and tcp have such a bound
    shm_dir: str = "/dev/shm"  # where shm and tcp put what their processes share

    def __post_init__(self) -> None:
        if self.world_size < 3:
            raise ConfigError(
                f"world_size={self.world_size} leaves no observer: a coordinator, an agent and at least one observer "
                "make 3. Give --world_size 3 or more."
            )
        sizes = self.state_size.split("-")
        if not all(size.isdecimal() and int(size) for size in sizes):
            raise ConfigError(
                f"state_size={self.state_size!r} is not a list of sizes above 0. Write the dimensions with dashes, as "
                "in --state_size 10-20-10."
            )
        for name, least in (("nlayers", 0), ("out_features", 1), ("episodes", 1), ("steps", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}.")
        if not 0 < self.max_wait_us < math.inf:
            raise ConfigError(f"max_wait_us={self.max_wait_us} must be a number of microseconds above 0.")
        if not (self.master_port.isdecimal() and int(self.master_port) < 65_536):
            raise ConfigError(
                f"master_port={self.master_port!r} is not a port. Give a number below 65536; 0 takes a free one."
            )
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device={self.device!r} is not known; there are cpu, cuda and cuda:NUMBER.")
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport={self.transport!r} is not known; there are {', '.join(TRANSPORTS)}.")

    @property
    def num_observers(self) -> int:
        return self.world_size - 2

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape of one state."""
        return tuple(int(size) for size in self.state_size.split("-"))

    @property
    def num_inputs(self) -> int:
        """The numbers of one state."""
        return math.prod(self.dims)

    @property
    def num_warm_up(self) -> int:
        """Requests of each observer that are not measured."""
        return NUM_WARM_UP_EPISODES * self.steps

    @property
    def num_measured(self) -> int:
        """Requests of each observer that are measured."""
        return self.episodes * self.steps

    @property
    def num_requests(self) -> int:
        """Requests of all observers, the warm-up included."""
        return self.num_observers * (self.num_warm_up + self.num_measured)


@dataclass(frozen=True, slots=True)
class Raw:
    """What one run measured, the warm-up left out.

    A round is what the agent answered together: all observers' requests, or a single one where `batch` is False.
    """

    agent_latency_s: Array  # (rounds,) from the first request of a round to its actions
    agent_batch: Array  # (rounds,) requests in each
    observer_latency_s: Array  # (num_observers, episodes * steps) from asking to having the action
    elapsed_s: float  # the measured part by the clock: the last observer's end after the first one's start
    extra: Mapping[str, Any] = field(default_factory=dict)  # what else the backend has to say; plain JSON values


Backend = Callable[[Setting, Progress], Raw]


def backend_of(transport: str) -> Backend:
    """The function that measures over `transport`; its module is imported only now."""
    module, _, function = TRANSPORTS[transport].partition(":")
    backend: Backend = getattr(import_module(module), function)
    return backend
