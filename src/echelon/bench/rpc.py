"""`echelon bench rpc`: latency and throughput of act requests, for one setting or every value of one argument.

An agent process serves observer processes; all transports have the same workload. The report has the format of
PyTorch's RPC benchmark for reinforcement learning, so that its scripts can read it: both the proposed format ("agent
latency", "50") and the merged one ("agent latency (seconds)", "p50"). Additional data is in the object `echelon`.
Imports no torch.
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
NUM_WARM_UP_EPISODES = 1  # before the measured episodes, over every transport; not part of the samples
PERCENTILES = (50, 75, 90, 95)
METRICS = ("agent latency", "agent throughput", "observer latency", "observer throughput")
LATENCY_DIGITS = 6  # microseconds
TITLE = "Echelon distributed rpc benchmark reinforcement learning suite"
RULE, SHORT_RULE = "-" * len(TITLE), "-" * 9


@dataclass(frozen=True, slots=True)
class RpcSetting(Setting):
    """One run: a coordinator, an agent, and `world_size - 2` observers that request actions."""

    world_size: int = option(10, "processes: a coordinator, an agent, and the rest observers")
    master_addr: str = option("127.0.0.1", "address of the agent (tcp, torch-rpc)")
    master_port: str = option("29501", "port of the agent; 0: any free port")
    batch: bool = option(True, "whether the agent serves all observers in one batch (True, False)")
    state_size: str = option("10-20-10", "dimensions of a state, separated by dashes")
    nlayers: int = option(5, "hidden layers of the policy", least=0)
    out_features: int = option(10, "number of actions, and width of the layers", least=1)
    output_file_path: str = option("benchmark_report.json", "the report, as JSON")
    episodes: int = option(10, "episodes per observer", least=1)
    steps: int = option(100, "requests per observer and episode", least=1)
    transport: str = option("shm", f"transport of the requests: {', '.join(TRANSPORTS)}", choices=tuple(TRANSPORTS))
    device: str = option("cpu", "device of the policy: cpu, cuda")
    max_wait_us: float = option(50_000.0, "how long a batch waits for an observer, in microseconds (shm, tcp)", above=0)
    shm_dir: str = option("/dev/shm", "folder of shared memory (shm, tcp)")

    def check(self) -> None:
        if self.world_size < 3:
            raise ConfigError(
                f"world_size={self.world_size} leaves no observer: a run needs a coordinator, an agent and at least "
                "one observer. Give --world_size 3 or more."
            )
        if not all(size.isdecimal() and int(size) for size in self.state_size.split("-")):
            raise ConfigError(
                f"state_size={self.state_size!r} is not a list of sizes above 0. Separate the dimensions by dashes, "
                "for example --state_size 10-20-10."
            )
        if not (self.master_port.isdecimal() and int(self.master_port) < 65_536):
            raise ConfigError(
                f"master_port={self.master_port!r} is not a port. Give a number below 65536; 0 takes any free port."
            )
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device={self.device!r} is unknown; use cpu, cuda or cuda:NUMBER.")

    @property
    def num_observers(self) -> int:
        return self.world_size - 2

    @property
    def num_inputs(self) -> int:
        """The number of values of one state."""
        return math.prod(int(size) for size in self.state_size.split("-"))

    @property
    def num_warm_up(self) -> int:
        """Unmeasured requests per observer."""
        return NUM_WARM_UP_EPISODES * self.steps

    @property
    def num_measured(self) -> int:
        """Measured requests per observer."""
        return self.episodes * self.steps

    @property
    def num_requests(self) -> int:
        """Requests of all observers, including the warm-up."""
        return self.num_observers * (self.num_warm_up + self.num_measured)


@dataclass(frozen=True, slots=True)
class Raw:
    """The measurements of one run, without the warm-up.

    A round is a batch of requests that the agent serves together; if `batch` is False, a single request.
    """

    agent_latency_s: Array  # (rounds,) from the first request of a round to its actions
    agent_batch: Array  # (rounds,) requests in each
    observer_latency_s: Array  # (num_observers, episodes * steps) from the request to its action
    elapsed_s: float  # wall time from the first observer's start to the last observer's end
    extra: Mapping[str, Any] = field(default_factory=dict)  # additional figures of the transport; plain JSON values


def transport_of(name: str) -> Callable[[RpcSetting, Progress], Raw]:
    """Imports and returns the function that measures over a transport."""
    module, _, function = TRANSPORTS[name].partition(":")
    run: Callable[[RpcSetting, Progress], Raw] = getattr(import_module(module), function)
    return run


def check_port(setting: RpcSetting) -> None:
    """Raises ConfigError unless the agent can listen on its address."""
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as the agent does: a recently closed port can be reused
        try:
            probe.bind((setting.master_addr, int(setting.master_port)))
        except OSError as error:
            raise ConfigError(
                f"the agent cannot listen on {setting.master_addr}:{setting.master_port}: {error.strerror}. Give an "
                "address of this machine and another port; --master_port 0 takes any free port."
            ) from error


class RpcBenchmark(Benchmark[RpcSetting, Raw]):
    """A sweep over one argument, the x axis, as in PyTorch's benchmark."""

    name = "rpc"
    text = """\
Measure act requests between an agent process and WORLD_SIZE - 2 observer processes. Each observer sends a random state
and waits for the action, EPISODES x STEPS times after a warm-up. One argument may be a comma-separated list, the x axis
of a sweep: one run for each of its values. `echelon bench plot` draws the report of a sweep.
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
            lines += [f"{metric} -- {_in_units(metric, metrics[metric])}", ""]
        lines.append(f"total -- {totals['requests_per_s']:,.0f} requests/s, {totals['mean_batch']:g} per batch\n")
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
    """Returns the four metrics of a run by percentile: latencies in seconds, throughputs in requests per second.

    A throughput is the number of requests of a round over its latency, so its high percentiles are the best rounds.
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
    """Returns the metrics under both names of a latency, with both names of the percentiles."""
    both = {
        metric: {f"{prefix}{p}": value for prefix in ("", "p") for p, value in percentiles.items()}
        for metric, percentiles in metrics.items()
    }
    return both | {f"{metric} (seconds)": both[metric] for metric in metrics if "latency" in metric}


def _in_units(metric: str, percentiles: Mapping[int, float]) -> str:
    """Returns a metric in a readable form: latencies in ms, throughputs in requests/s."""
    is_latency = "latency" in metric
    texts = [f"p{p} {1e3 * value:.3f}" if is_latency else f"p{p} {value:,.0f}" for p, value in percentiles.items()]
    return f"{', '.join(texts)} {'ms' if is_latency else 'requests/s'}"


def _percentiles(samples: Array) -> dict[int, float]:
    return dict(zip(PERCENTILES, np.percentile(samples, PERCENTILES).tolist(), strict=True))


def _totals(setting: RpcSetting, raw: Raw) -> dict[str, Any]:
    """Returns the totals of a run."""
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
