"""`echelon bench rpc` with its processes: over shared memory and TCP, with many observers, stopped, killed, cut off."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echelon.bench import rpc_processes
from echelon.bench.processes import free_port
from echelon.bench.rpc import Raw, RpcBenchmark, RpcSetting
from echelon.bench.rpc_processes import BenchCoordinator
from echelon.cli.main import main
from echelon.errors import ConfigError, RunError, TransportError
from running import Running

Look = Callable[[BenchCoordinator], None]
LONG = 10**5  # episodes: of runs that are ended from outside


def small(shm_dir: Path, **changes: Any) -> RpcSetting:
    """A run of a moment."""
    setting = RpcSetting(world_size=4, state_size="2-3", episodes=2, steps=10, master_port="0", shm_dir=str(shm_dir))
    return replace(setting, max_wait_us=10e6, **changes)


def run(setting: RpcSetting, look: Look | None = None) -> Raw:
    """Measures `setting`; `look` is called again and again meanwhile."""

    class Watched(BenchCoordinator):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.progress = lambda done, total: look(self) if look is not None else None

    return rpc_processes.run(setting, lambda done, total: None, Watched)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("batch", "num_observers"), [(True, 24), (False, 2)])  # torch.distributed.rpc holds 18 at most
def test_every_request_is_answered_and_measured(transport: str, batch: bool, num_observers: int, shm_dir: Path) -> None:
    raw = run(small(shm_dir, transport=transport, batch=batch, world_size=num_observers + 2))
    assert raw.observer_latency_s.shape == (num_observers, 20) and (raw.observer_latency_s > 0).all()
    assert raw.agent_batch.sum() == 20 * num_observers and (raw.agent_latency_s > 0).all()
    assert (raw.agent_batch == (num_observers if batch else 1)).all()  # batches are whole: nobody was missing
    assert raw.elapsed_s >= raw.observer_latency_s.sum(1).max()
    assert not list(shm_dir.iterdir())


def test_a_sweep_on_one_port_from_the_command_line_to_the_report(
    shm_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    path = tmp_path / "report.json"
    arguments = [
        "-world_size=4,5",
        f"-master_port={port}",
        "-state_size=2-3",
        "-batch=True",
        f"-output_file_path={path}",
    ]
    own = ["--transport=tcp", "--episodes=2", "--steps=5", f"--shm-dir={shm_dir}"]
    assert main(["bench", "rpc", *arguments, *own]) == 0
    report = json.loads(path.read_text())
    assert [result["world_size"] for result in report["benchmark_results"]] == [4, 5]
    assert [entry["num_requests"] for entry in report["echelon"]["runs"]] == [20, 30]
    out, err = capsys.readouterr()
    *progress, told = err.splitlines()
    assert told == f"the report is in {path}; `echelon bench plot {path}` draws it"
    assert all(re.fullmatch(r"world_size [45] \([12]/2\): \d+ of \d+ requests", line) for line in progress), progress
    assert out.count("Benchmark\n") == 2
    for result in report["benchmark_results"]:  # the screen and the file say the same
        for metric in ("agent latency", "observer latency"):
            assert f"{metric} -- p50 {1e3 * result[metric]['50']:.3f}, p75 " in out
        for metric in ("agent throughput", "observer throughput"):
            assert f"{metric} -- p50 {result[metric]['50']:,.0f}, p75 " in out
    assert not list(shm_dir.iterdir())


def test_a_port_that_is_taken_is_refused(shm_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*--master_port 0"):
            run(small(shm_dir, transport="tcp", master_port=port))
        for transport in ("tcp", "torch-rpc"):
            with pytest.raises(ConfigError, match="cannot listen"):
                RpcBenchmark().prepare([small(shm_dir, transport=transport, master_port=port)])
        RpcBenchmark().prepare([small(shm_dir, transport="shm", master_port=port)])  # which needs none
    assert not list(shm_dir.iterdir())


@pytest.mark.parametrize(
    ("num_observers", "episodes", "stopped_s"),
    [(4, 400, 0.0), pytest.param(100, 60, 5.0, marks=pytest.mark.full)],
)
def test_an_observer_that_is_stopped_costs_the_others_one_wait(
    num_observers: int, episodes: int, stopped_s: float, shm_dir: Path
) -> None:
    """While it is stopped the others are answered hundreds of times; afterwards it is answered to the end."""
    max_wait_s, stopped = 1.0, 2  # longer than a busy machine holds anybody up; the third observer
    seen: list[Any] = []  # what everybody had been answered when it was stopped, and when it was let go

    def look(run: BenchCoordinator) -> None:
        nonlocal started_s
        answered = run.results.num_answered
        pid = run.processes.engine.pid(f"observer{stopped + 2}")
        if not seen and answered.min() > 2 * run.setting.num_warm_up:
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            started_s = time.monotonic()
            seen.append(answered.copy())
        elif len(seen) == 1 and np.delete(answered - seen[0], stopped).min() >= 300:
            if time.monotonic() - started_s < stopped_s:
                return
            assert pid is not None
            seen.append(answered.copy())
            os.kill(pid, signal.SIGCONT)

    started_s = 0.0
    setting = small(shm_dir, world_size=num_observers + 2, episodes=episodes, steps=100)
    raw = run(replace(setting, max_wait_us=max_wait_s * 1e6), look)
    assert len(seen) == 2, "the observers ended before one was stopped"
    meanwhile = seen[1] - seen[0]
    assert meanwhile[stopped] <= 1  # the answer that was under way
    others = np.delete(raw.observer_latency_s, stopped, axis=0)
    num_waits = (others > 0.9 * max_wait_s).sum(1)
    print(f"answered meanwhile: {np.delete(meanwhile, stopped).min()} each; longest wait: {others.max():.3f} s")
    # Once, and what a busy machine adds; waited for in every round, it would have been 300 times.
    assert (num_waits < 20).all(), f"the others waited {num_waits} times"
    assert raw.agent_batch.sum() == raw.observer_latency_s.size and (raw.observer_latency_s > 0).all()


@pytest.mark.parametrize("name", ["agent", "observer3"])
def test_a_process_that_dies_ends_the_run(name: str, shm_dir: Path) -> None:
    killed: list[int] = []

    def look(run: BenchCoordinator) -> None:
        pid = run.processes.engine.pid(name)
        if run.results.num_answered.min() > 0 and pid is not None and not killed:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(RunError, match=rf"{name} \(process \d+\) was ended by SIGKILL"):
        run(small(shm_dir, episodes=LONG), look)
    assert not list(shm_dir.iterdir())


def test_an_exception_in_a_process_reaches_the_user(shm_dir: Path) -> None:
    class Broken(BenchCoordinator):
        def start(self, name: str, entry: str, **config: Any) -> None:
            super().start(name, entry, **{**config, "index": -7} if name == "observer3" else config)

    with pytest.raises(RunError, match=r"(?s)observer3 failed: .*Error: .*Traceback.*rpc_processes\.py"):
        rpc_processes.run(small(shm_dir), lambda done, total: None, Broken)
    assert not list(shm_dir.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is_interrupted(number: int, shm_dir: Path, tmp_path: Path) -> None:
    options = [f"--episodes={LONG}", "--world_size=6", f"--shm_dir={shm_dir}", f"--output_file_path={tmp_path}/r.json"]
    running = Running(tmp_path / "run", shm_dir, "bench", "rpc", *options)
    try:
        running.until(lambda: list(shm_dir.glob("echelon-*/acting")), "the board is made")
        running.process.send_signal(number)
        assert running.code() == (130 if number == signal.SIGINT else -number)
        assert "Traceback" not in running.text()
        running.assert_nothing_left()
    finally:
        running.close()


def test_a_results_segment_that_does_not_fit_is_told(tmp_path: Path) -> None:
    huge = small(tmp_path, world_size=1002, episodes=10**9, steps=10**3)
    with pytest.raises(TransportError, match="cannot reserve"):
        run(huge)
    assert not list(tmp_path.iterdir())
