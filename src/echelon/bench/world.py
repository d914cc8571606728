"""`echelon bench world`: how fast calls between processes are, beside torch.distributed.rpc.

The two libraries take turns, and every turn starts their two processes (`world_pair`) anew: TensorPipe's threads poll
all the time, also while nothing is called, so a pair that waited for its turn would take the cores from the other.
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
ADDRESS = "address"  # the file that says where the two may meet over TCP
PAIR = "echelon.bench.world_pair"  # the module that the two processes run
START_S = 120.0
LEAVE_S = {"echelon": 60.0, "torch-rpc": 0.0}  # how long the callee may take; that of torch-rpc would never leave
UNITS = {
    "small round trip p50": "us",
    "small round trip p95": "us",
    "small round trip p99": "us",
    "large echo": "GB/s",
    "small calls": "calls/s",
}


@dataclass(frozen=True, slots=True)
class WorldSetting(Setting):
    """Two processes, of which one calls the other; each library has its own two, and they take turns."""

    small: int = option(1024, "bytes of the small tensor", least=4)
    large: int = option(4 << 20, "bytes of the large tensor", least=4)
    in_flight: int = option(64, "calls under way at once, for calls per second", least=1)
    seconds: float = option(2.0, "time of each figure in a turn", above=0)
    rounds: int = option(4, "turns of each library; medians are told", least=1)
    transport: str = option("local", f"what carries the calls of ours: {', '.join(TRANSPORTS)}", choices=TRANSPORTS)
    peer: str = option("torch-rpc", f"what is measured beside it: {', '.join(PEERS)}", choices=PEERS)


class WorldBenchmark(Benchmark[WorldSetting, Sequence[Measure]]):
    """One run at a time: nothing is swept."""

    name = "world"
    text = """\
Measure calls between two processes of a world, and of torch.distributed.rpc, which take turns on this machine:
  small round trip        one call after another, with a tensor that comes back
  large echo              the same with a large tensor; the bytes of both ways are counted
  small calls             calls per second with many under way
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
    """How many times as good ours is, by the medians: less time, or more of anything else."""
    ours, *peers = (spread.median for spread in measure.by.values())
    if not peers:
        return None
    return peers[0] / ours if measure.unit == "us" else ours / peers[0]


def take_turn(library: str, setting: WorldSetting) -> dict[str, float]:
    """What calls of `library` reach: the caller measures, and both leave."""
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
            raise RunError(f"{library} was not done within {error.timeout:.0f} s.\n\n{_logs(folder)}") from None
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        if processes[0].returncode:
            raise RunError(f"{library} left with code {processes[0].returncode}.\n\n{_logs(folder)}")
    return {name: float(value) for name, value in json.loads(told).items()}


def _logs(folder: str) -> str:
    return "\n".join(f"{name}: {(Path(folder) / name).read_text(errors='replace')}" for name in NAMES)
