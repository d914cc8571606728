"""The report of `echelon bench rpc`: the percentiles of four metrics per run, as JSON and as lines on the screen.

The JSON object has the shape of PyTorch's RPC benchmark for reinforcement learning, so that scripts which read that
read this; what it has no place for lies in one more object, `echelon`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.bench.rpc.setting import NUM_WARM_UP_EPISODES, Raw, Setting

Array = np.ndarray[Any, Any]
PERCENTILES = (50, 75, 90, 95)
METRICS = ("agent latency", "agent throughput", "observer latency", "observer throughput")
LATENCY_DIGITS = 6  # microseconds
TITLE = "Echelon distributed rpc benchmark reinforcement learning suite"
RULE, SHORT_RULE = "-" * len(TITLE), "-" * 9


def metrics_of(raw: Raw) -> dict[str, dict[int, float]]:
    """The four metrics of a run: latencies in seconds, throughputs in requests per second, by percentile.

    A throughput is the reciprocal of one latency, times the requests it answered, so its high percentiles are its
    best moments.
    """
    observer_latency_s = raw.observer_latency_s.reshape(-1)
    return {
        "agent latency": _latencies(raw.agent_latency_s),
        "agent throughput": _throughputs(raw.agent_batch / raw.agent_latency_s),
        "observer latency": _latencies(observer_latency_s),
        "observer throughput": _throughputs(1.0 / observer_latency_s),
    }


def _latencies(samples: Array) -> dict[int, float]:
    values = np.percentile(samples, PERCENTILES).tolist()
    return {p: round(value, LATENCY_DIGITS) for p, value in zip(PERCENTILES, values, strict=True)}


def _throughputs(samples: Array) -> dict[int, float]:
    return {p: int(value) for p, value in zip(PERCENTILES, np.percentile(samples, PERCENTILES).tolist(), strict=True)}


class Report:
    """Grows by one run at a time; `x_axis_name` is the argument that varies from run to run."""

    def __init__(self, settings: Sequence[Setting], x_axis_name: str = "") -> None:
        arguments = dataclasses.asdict(settings[0])
        arguments.pop(x_axis_name, None)
        self.arguments = {**arguments, "x_axis_name": x_axis_name} if x_axis_name else arguments
        self.x_axis_name = x_axis_name
        self.device = next((setting.device for setting in settings if setting.device != "cpu"), "cpu")
        self.results: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []

    def add(self, setting: Setting, raw: Raw) -> None:
        x = {self.x_axis_name: getattr(setting, self.x_axis_name)} if self.x_axis_name else {}
        self.results.append({**metrics_of(raw), **x})
        num_requests = raw.observer_latency_s.size
        self.runs.append(
            {
                **x,
                "transport": setting.transport,
                "num_observers": setting.num_observers,
                "requests_per_s": round(num_requests / raw.elapsed_s, 1),
                "mean_batch": round(float(np.mean(raw.agent_batch)), 3),
                "num_requests": num_requests,
                "num_rounds": len(raw.agent_latency_s),
                "elapsed_s": round(raw.elapsed_s, LATENCY_DIGITS),
                **raw.extra,
            }
        )

    @functools.cached_property
    def machine(self) -> dict[str, Any]:
        """What all runs ran on."""
        from echelon.bench.machine import hardware
        from echelon.runs.folder import versions  # brings torch along, which the first run need not wait for

        return {"hardware": hardware(self.device), "versions": versions()}

    def to_json(self) -> dict[str, Any]:
        warm_up = {"episodes": NUM_WARM_UP_EPISODES, "measured": False}
        extra = {**self.machine, "warm_up": warm_up, "runs": self.runs}
        return {**self.arguments, "benchmark_results": self.results, "echelon": extra}

    def write(self, path: Path) -> None:
        """Replaces the file at `path`, whole or not at all."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    # As lines.

    def head(self) -> str:
        lines = [f"{key} : {value}" for key, value in self.arguments.items()]
        return "\n".join([RULE, TITLE, RULE, *lines])

    def last(self) -> str:
        """The newest run."""
        result, run = self.results[-1], self.runs[-1]
        lines = [SHORT_RULE, "Benchmark"]
        if self.x_axis_name:
            lines.append(f"{self.x_axis_name} : {result[self.x_axis_name]}")
        for metric in METRICS:
            lines += [f"{metric} -- {result[metric]}", ""]
        lines.append(f"in all -- {run['requests_per_s']:,.0f} requests/s, {run['mean_batch']:g} to a batch\n")
        return "\n".join(lines)
