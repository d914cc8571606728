"""`echelon bench rpc`: latency and throughput of act requests, once or for every value of one argument.

An agent process answers observer processes; every transport carries the same workload. The report has the shape of
PyTorch's RPC benchmark for reinforcement learning, so that scripts which read that read this: as it was when it was
proposed ("agent latency", "50") and as it was merged ("agent latency (seconds)", "p50"). What it has no place for lies
in one more object, `echelon`. Needs no torch.
"""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from echelon.bench.harness import Benchmark, Progress, Runs, Setting, Sweep, machine, option
from echelon.errors import ConfigError

Array = np.ndarray[Any, Any]
TRANSPORTS = {
    "shm": "echelon.bench.rpc_processes:run",
    "tcp": "echelon.bench.rpc_processes:run",
    "torch-rpc": "echelon.bench.rpc_torch:run",
    "ray": "echelon.bench.rpc_ray:run",
}
NUM_WARM_UP_EPISODES = 1  # before the measured ones, over every transport alike; their samples are left out
PERCENTILES = (50, 75, 90, 95)
METRICS = ("agent latency", "agent throughput", "observer latency", "observer throughput")
LATENCY_DIGITS = 6  # microseconds
TITLE = "Echelon distributed rpc benchmark reinforcement learning suite"
RULE, SHORT_RULE = "-" * len(TITLE), "-" * 9


@dataclass(frozen=True, slots=True)
class RpcSetting(Setting):
    """One run: a coordinator, an agent, and `world_size - 2` observers that ask it for actions."""

    world_size: int = option(10, "processes: a coordinator, an agent, and the rest observers")
    master_addr: str = option("127.0.0.1", "where the agent listens (tcp, torch-rpc)")
    master_port: str = option("29501", "its port; 0 takes a free one")
    batch: bool = option(True, "whether the agent answers all observers together (True, False)")
    state_size: str = option("10-20-10", "the dimensions of a state, with dashes")
    nlayers: int = option(5, "hidden layers of the policy", least=0)
    out_features: int = option(10, "actions, and the width of the layers", least=1)
    output_file_path: str = option("benchmark_report.json", "the report, as JSON")
    episodes: int = option(10, "episodes of each observer", least=1)
    steps: int = option(100, "requests of an observer in one episode", least=1)
    transport: str = option("shm", f"what carries the requests: {', '.join(TRANSPORTS)}", choices=tuple(TRANSPORTS))
    device: str = option("cpu", "where the policy is computed: cpu, cuda")
    max_wait_us: float = option(50_000.0, "how long a batch waits for an observer, in microseconds (shm, tcp)", above=0)
    shm_dir: str = option("/dev/shm", "where shared memory lives (shm, tcp)")

    def check(self) -> None:
        if self.world_size < 3:
            raise ConfigError(
                f"world_size={self.world_size} leaves no observer: a coordinator, an agent and at least one observer "
                "make 3. Give --world_size 3 or more."
            )
        if not all(size.isdecimal() and int(size) for size in self.state_size.split("-")):
            raise ConfigError(
                f"state_size={self.state_size!r} is not a list of sizes above 0. Write the dimensions with dashes, as "
                "in --state_size 10-20-10."
            )
        if not (self.master_port.isdecimal() and int(self.master_port) < 65_536):
            raise ConfigError(
                f"master_port={self.master_port!r} is not a port. Give a number below 65536; 0 takes a free one."
            )
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device={self.device!r} is not known; there are cpu, cuda and cuda:NUMBER.")

    @property
    def num_observers(self) -> int:
        return self.world_size - 2

    @property
    def num_inputs(self) -> int:
        """The numbers of one state."""
        return math.prod(int(size) for size in self.state_size.split("-"))

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
    extra: Mapping[str, Any] = field(default_factory=dict)  # what else the transport has to say; plain JSON values


def transport_of(name: str) -> Callable[[RpcSetting, Progress], Raw]:
    """The function that measures over a transport; its module is imported only now."""
    module, _, function = TRANSPORTS[name].partition(":")
    run: Callable[[RpcSetting, Progress], Raw] = getattr(import_module(module), function)
    return run


def check_port(setting: RpcSetting) -> None:
    """Raises ConfigError unless the agent can listen where it is to."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the agent does: a port just left is free
        try:
            probe.bind((setting.master_addr, int(setting.master_port)))
        except OSError as error:
            raise ConfigError(
                f"the agent cannot listen on {setting.master_addr}:{setting.master_port}: {error.strerror}. Give an "
                "address of this machine and another port; --master_port 0 takes a free one."
            ) from error


class RpcBenchmark(Benchmark[RpcSetting, Raw]):
    """A sweep has one x axis, as the benchmark it follows has."""

    name = "rpc"
    text = """\
Measure act requests: an agent process and WORLD_SIZE - 2 observer processes. Each observer sends a random state and
waits for the action, EPISODES x STEPS times after a warm-up. One argument may be a comma-separated list, which becomes
the x axis: one run for each of its values. `echelon bench plot` draws the report of such a sweep.
"""
    setting = RpcSetting
    output = "output_file_path"
    swept = tuple(
        name
        for name in RpcSetting.options()
        if name not in ("master_addr", "master_port", "output_file_path", "shm_dir")
    )
    max_varied = 1

    def spellings(self, name: str) -> Sequence[str]:
        return tuple(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}", f"-{name}")))

    def metavar(self, name: str) -> str:
        return name.upper()

    def prepare(self, settings: Sequence[RpcSetting]) -> None:
        for setting in settings:
            if setting.transport == "ray" and find_spec("ray") is None:
                raise ConfigError(
                    "transport=ray needs Ray, which is not installed. Install the extra: pip install 'echelon[ray]' "
                    "(in a checkout: pip install -e '.[ray]')."
                )
            if setting.transport in ("tcp", "torch-rpc"):
                check_port(setting)

    def measure(self, setting: RpcSetting, progress: Progress) -> Raw:
        return transport_of(setting.transport)(setting, progress)

    def unit(self, setting: RpcSetting) -> str:
        return "requests"

    def label(self, setting: RpcSetting) -> str:
        return setting.transport

    def head(self, sweep: Sweep[RpcSetting]) -> str:
        return "\n".join([RULE, TITLE, RULE, *(f"{key} : {value}" for key, value in _arguments(sweep).items())])

    def newest(self, runs: Runs[RpcSetting, Raw]) -> str:
        setting, raw = runs.newest
        totals, metrics = _totals(setting, raw), metrics_of(raw)
        lines = [SHORT_RULE, "Benchmark"]
        lines += [f"{name} : {value}" for name, value in runs.sweep.values(setting).items()]
        for metric in METRICS:
            lines += [f"{metric} -- {metrics[metric]}", ""]
        lines.append(f"in all -- {totals['requests_per_s']:,.0f} requests/s, {totals['mean_batch']:g} to a batch\n")
        return "\n".join(lines)

    def is_drawn(self, sweep: Sweep[RpcSetting]) -> bool:
        return bool(sweep.varied)

    def report(self, runs: Runs[RpcSetting, Raw]) -> dict[str, Any]:
        sweep = runs.sweep
        device = next((setting.device for setting in sweep.settings if setting.device != "cpu"), "cpu")
        warm_up = {"episodes": NUM_WARM_UP_EPISODES, "measured": False}
        totals = [{**sweep.values(setting), **_totals(setting, raw)} for setting, raw in runs]
        return {
            **_arguments(sweep),
            "benchmark_results": [
                {**in_both_styles(metrics_of(raw)), **sweep.values(setting)} for setting, raw in runs
            ],
            "echelon": {**machine(device), "warm_up": warm_up, "runs": totals},
        }


def _arguments(sweep: Sweep[RpcSetting]) -> dict[str, Any]:
    return sweep.common | ({"x_axis_name": sweep.varied[0]} if sweep.varied else {})


def metrics_of(raw: Raw) -> dict[str, dict[int, float]]:
    """The four metrics of a run: latencies in seconds, throughputs in requests per second, by percentile.

    A throughput is the reciprocal of one latency, times the requests it answered, so its high percentiles are its
    best moments.
    """
    observer_latency_s = raw.observer_latency_s.reshape(-1)
    latencies = {"agent latency": raw.agent_latency_s, "observer latency": observer_latency_s}
    throughputs = {
        "agent throughput": raw.agent_batch / raw.agent_latency_s,
        "observer throughput": 1.0 / observer_latency_s,
    }
    found: dict[str, dict[int, float]] = {}
    for metric, samples in latencies.items():
        found[metric] = {p: round(value, LATENCY_DIGITS) for p, value in _percentiles(samples).items()}
    for metric, samples in throughputs.items():
        found[metric] = {p: int(value) for p, value in _percentiles(samples).items()}
    return {metric: found[metric] for metric in METRICS}


def in_both_styles(metrics: Mapping[str, Mapping[int, float]]) -> dict[str, dict[str, float]]:
    """Metrics by both names that a latency has, with percentiles by both names that those have."""
    both = {
        metric: {f"{prefix}{p}": value for prefix in ("", "p") for p, value in percentiles.items()}
        for metric, percentiles in metrics.items()
    }
    return both | {f"{metric} (seconds)": both[metric] for metric in metrics if "latency" in metric}


def _percentiles(samples: Array) -> dict[int, float]:
    return dict(zip(PERCENTILES, np.percentile(samples, PERCENTILES).tolist(), strict=True))


def _totals(setting: RpcSetting, raw: Raw) -> dict[str, Any]:
    """What the run did as a whole."""
    num_requests = raw.observer_latency_s.size
    return {
        "transport": setting.transport,
        "num_observers": setting.num_observers,
        "requests_per_s": round(num_requests / raw.elapsed_s, 1),
        "mean_batch": round(float(np.mean(raw.agent_batch)), 3),
        "num_requests": num_requests,
        "num_rounds": len(raw.agent_latency_s),
        "elapsed_s": round(raw.elapsed_s, LATENCY_DIGITS),
        **raw.extra,
    }
