"""`echelon bench world`: speed of calls between processes, compared with torch.distributed.rpc.

The two libraries alternate, and every turn starts two new processes (`world_pair`): TensorPipe's threads poll all the
time, even without calls, so an idle pair would take the cores from the other.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.bench.harness import (
    Benchmark,
    Measure,
    Progress,
    Runs,
    Setting,
    in_turns,
    machine,
    measure_table,
    option,
)
from echelon.bench.processes import free_port
from echelon.errors import RunError

TRANSPORTS = ("local", "tcp")
PEERS = ("torch-rpc", "none")
OURS = "echelon"
NAMES = ("caller", "callee")
ADDRESS = "address"  # the file with the TCP address of the pair
PAIR = "echelon.bench.world_pair"  # the module that the two processes run
START_S = 120.0
LEAVE_S = {
    "echelon": 60.0,
    "torch-rpc": 0.0,
}  # how long the callee may take to exit; that of torch-rpc never exits by itself
UNITS = {
    "small round trip p50": "us",
    "small round trip p95": "us",
    "small round trip p99": "us",
    "large echo": "GB/s",
    "small calls": "calls/s",
}


@dataclass(frozen=True, slots=True)
class WorldSetting(Setting):
    """Two processes, of which one calls the other; each library has its own pair, and the pairs alternate."""

    small: int = option(1024, "bytes of the small tensor", least=4)
    large: int = option(4 << 20, "bytes of the large tensor", least=4)
    in_flight: int = option(64, "concurrent calls, for calls per second", least=1)
    seconds: float = option(2.0, "duration of each figure in a turn", above=0)
    rounds: int = option(4, "turns of each library; medians are reported", least=1)
    transport: str = option("local", f"transport of Echelon's calls: {', '.join(TRANSPORTS)}", choices=TRANSPORTS)
    peer: str = option("torch-rpc", f"library to compare with: {', '.join(PEERS)}", choices=PEERS)


class WorldBenchmark(Benchmark[WorldSetting, Sequence[Measure]]):
    """A single run, without sweeps."""

    name = "world"
    text = """\
Measure calls between two processes of a world, and of torch.distributed.rpc, in alternating turns on this machine:
  small round trip        sequential calls that return a small tensor
  large echo              the same with a large tensor; counts the bytes of both directions
  small calls             calls per second with many calls in flight
"""
    setting = WorldSetting

    def prepare(self, settings: Sequence[WorldSetting]) -> None:
        if any(setting.peer == "torch-rpc" for setting in settings):
            from echelon.bench.rpc_torch import check_available

            check_available("give --peer none")

    def measure(self, setting: WorldSetting, progress: Progress) -> Sequence[Measure]:
        libraries = [OURS] if setting.peer == "none" else [OURS, setting.peer]
        turns: dict[str, list[dict[str, float]]] = {library: [] for library in libraries}
        total = setting.rounds * len(libraries)
        for _, library in in_turns(libraries, setting.rounds):
            progress(sum(map(len, turns.values())), total)
            turns[library].append(take_turn(library, setting))
        progress(total, total)
        return [
            Measure.of(figure, unit, {library: [turn[figure] for turn in each] for library, each in turns.items()})
            for figure, unit in UNITS.items()
        ]

    def unit(self, setting: WorldSetting) -> str:
        return "turns"

    def label(self, setting: WorldSetting) -> str:
        return f"world over {setting.transport}"

    def newest(self, runs: Runs[WorldSetting, Sequence[Measure]]) -> str:
        setting, measures = runs.newest
        head = (
            f"small {setting.small:,} bytes, large {setting.large:,} bytes, {setting.in_flight} calls in flight, "
            f"transport {setting.transport}, {setting.rounds} turns each"
        )
        return "\n".join([head, "", *measure_table(measures, "better", times_better)])

    def report(self, runs: Runs[WorldSetting, Sequence[Measure]]) -> dict[str, Any]:
        setting, measures = runs.newest
        figures = [dataclasses.asdict(measure) for measure in measures]
        return {"bench": self.name, "setting": dataclasses.asdict(setting), "measures": figures, **machine()}


def times_better(measure: Measure) -> float | None:
    """Returns how many times better Echelon is, by the medians: less time, or more of any other unit."""
    ours, *peers = (spread.median for spread in measure.by.values())
    if not peers:
        return None
    return peers[0] / ours if measure.unit == "us" else ours / peers[0]


def take_turn(library: str, setting: WorldSetting) -> dict[str, float]:
    """Runs one turn of `library`: the caller measures, and both processes exit."""
    limit_s = START_S + 10 * setting.seconds
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        (Path(folder) / ADDRESS).write_text(f"tcp://127.0.0.1:{free_port()}")
        words = json.dumps({"setting": dataclasses.asdict(setting), "folder": folder, "parent": os.getpid()})
        try:
            for name in NAMES:
                with (Path(folder) / name).open("wb") as log:
                    command = [sys.executable, "-m", PAIR, library, name, words]
                    processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log))
            told, _ = processes[0].communicate(timeout=limit_s)
            if not processes[0].returncode and LEAVE_S[library]:
                processes[1].communicate(timeout=LEAVE_S[library])
        except subprocess.TimeoutExpired as error:
            raise RunError(f"{library} did not finish within {error.timeout:.0f} s.\n\n{_logs(folder)}") from None
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        if processes[0].returncode:
            raise RunError(f"{library} exited with code {processes[0].returncode}.\n\n{_logs(folder)}")
    return {name: float(value) for name, value in json.loads(told).items()}


def _logs(folder: str) -> str:
    return "\n".join(f"{name}: {(Path(folder) / name).read_text(errors='replace')}" for name in NAMES)
