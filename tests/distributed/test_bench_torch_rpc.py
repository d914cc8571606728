"""`--transport torch-rpc`: real ranks, whole rounds, ports free between runs, and a dead rank reaches the user."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from echelon.bench import processes, rpc_processes, rpc_torch
from echelon.bench.harness import Progress
from echelon.bench.rpc import Raw, RpcSetting, transport_of
from echelon.bench.rpc_processes import BenchCoordinator
from echelon.errors import ConfigError, EchelonError, RunError
from hosts import NEAR, SECRET, Words, as_another_host, made_hosts
from running import parent_of, wait_until
from telling import children


def setting_of(shm_dir: Path, **fields: object) -> RpcSetting:
    small = {"world_size": 4, "episodes": 2, "steps": 6, "state_size": "3-5", "master_port": "0"}
    return RpcSetting(**{"transport": "torch-rpc", "shm_dir": str(shm_dir), **small, **fields})  # type: ignore[arg-type]


pytestmark = pytest.mark.full  # the library that ours is measured beside


def children_of(pid: int) -> list[int]:
    """In the order of their start."""
    if pid == os.getpid():
        return sorted(children())
    numbers = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return sorted(number for number in numbers if parent_of(number) == pid)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def check(raw: Raw, setting: RpcSetting) -> None:
    num_requests = setting.num_observers * setting.num_measured
    assert raw.observer_latency_s.shape == (setting.num_observers, setting.num_measured)
    assert (raw.observer_latency_s > 0).all() and (raw.agent_latency_s > 0).all()
    assert raw.agent_batch.sum() == num_requests  # each measured request once, and none of the warm-up
    assert set(raw.agent_batch) == {setting.num_observers if setting.batch else 1}
    # An observer asks one thing at a time, so its latencies fit into the measured time.
    assert raw.elapsed_s >= raw.observer_latency_s.sum(axis=1).max()


def test_both_ways_of_answering_one_after_the_other_on_one_port(shm_dir: Path) -> None:
    before = children_of(os.getpid())
    port = str(processes.free_port())
    for batch in (True, False):
        setting = setting_of(shm_dir, batch=batch, master_port=port)
        told: list[tuple[int, int]] = []
        raw = transport_of("torch-rpc")(setting, lambda done, total, told=told: told.append((done, total)))  # type: ignore[misc]
        check(raw, setting)
        assert raw.extra == {"tensorpipe_transports": "default"}
        assert {total for _, total in told} == {setting.num_requests}
        assert np.all(np.diff([done for done, _ in told]) >= 0)
    assert set(children_of(os.getpid())) <= set(before)  # what others left may end meanwhile
    assert not list(shm_dir.iterdir())


def test_a_rank_that_dies_ends_the_run_and_is_named(shm_dir: Path) -> None:
    before = children_of(os.getpid())
    ranks: list[int] = []
    killed: list[int] = []

    def kill_one(done: int, total: int) -> None:
        if len(ranks) < 4:  # before they call each other: they spin then, and looking for them may take half a minute
            holders = [child for server in set(children_of(os.getpid())) - set(before) for child in children_of(server)]
            ranks[:] = [rank for holder in holders for rank in children_of(holder)]  # in the order of their start
        elif done and not killed:
            killed.append(ranks[2])
            os.kill(ranks[2], signal.SIGKILL)

    with pytest.raises(RunError, match="observer2 was ended by SIGKILL"):
        rpc_torch.run(setting_of(shm_dir, episodes=100_000), kill_one)
    assert len(ranks) == 4
    wait_until(lambda: not [rank for rank in ranks if is_alive(rank)], "the other ranks are gone")
    assert set(children_of(os.getpid())) <= set(before)  # what others left may end meanwhile
    assert not list(shm_dir.iterdir())


def test_where_too_many_ranks_meet_at_once_tcp_takes_them_in(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[type[BenchCoordinator]] = []
    really_run = rpc_processes.run

    def run(setting: RpcSetting, progress: Progress, kind: type[BenchCoordinator] = BenchCoordinator) -> Raw:
        kinds.append(kind)
        if kind is rpc_torch.TorchCoordinator:  # what PyTorch says of some 20 ranks and more, depending on the load
            raise RunError("observer19 failed: RuntimeError: connect: Resource temporarily unavailable")
        return really_run(setting, progress, kind)

    monkeypatch.setattr(rpc_processes, "run", run)
    setting = setting_of(shm_dir)
    raw = rpc_torch.run(setting, lambda done, total: None)
    check(raw, setting)
    assert kinds == [rpc_torch.TorchCoordinator, rpc_torch.TorchCoordinatorOverTcp]
    assert raw.extra == {"tensorpipe_transports": "uv"}


def test_an_error_inside_a_rank_reaches_the_user(shm_dir: Path) -> None:
    with pytest.raises(EchelonError, match=r"(?i)cuda"):  # no machine has a hundred GPUs; the agent finds out
        rpc_torch.run(setting_of(shm_dir, device="cuda:99"), lambda done, total: None)
    assert not list(shm_dir.iterdir())


def test_a_port_that_is_taken_is_refused_before_anything_starts(shm_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        with pytest.raises(ConfigError, match=rf"{port}.*{re.escape('--master_port 0')}"):
            rpc_torch.run(setting_of(shm_dir, master_port=port), lambda done, total: None)
    assert not list(shm_dir.iterdir())


def test_a_pytorch_without_rpc_is_named(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_torch.rpc, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"this build of PyTorch .* has no torch\.distributed\.rpc"):
        rpc_torch.run(setting_of(shm_dir), lambda done, total: None)


@pytest.mark.full
def test_between_hosts_tensors_cross_the_link(tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of one machine could copy them past it."""
    monkeypatch.setenv("ECHELON_SECRET", SECRET)
    options = ["--transport=torch-rpc", f"--master_addr={NEAR}", "--world_size=4", "--episodes=1", "--steps=100"]
    places = [f"--output_file_path={tmp_path / 'report.json'}", f"--shm_dir={shm_dir}"]
    with made_hosts() as (near, _):
        before = sent(near)
        done = as_another_host(*near, sys.executable, "-m", "echelon.cli.main", "bench", "rpc", *options, *places)
        assert done.returncode == 0, done.stderr
        num_requests, nbytes = 2 * 2 * 100, 4 * 10 * 20 * 10  # of two observers, in the warm-up and measured
        assert sent(near) - before >= num_requests * nbytes


def sent(host: Words) -> int:
    """The bytes that a host has sent to itself."""
    rows = [line.split() for line in Path(f"/proc/{host[2]}/net/dev").read_text().splitlines()]
    return next(int(row[9]) for row in rows if row[0] == "lo:")
