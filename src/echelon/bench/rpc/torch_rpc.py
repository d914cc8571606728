"""`--transport torch-rpc`: the same workload over torch.distributed.rpc, as an experienced user of it would write it.

Starts the ranks (`torch_rank`) and watches over them: whoever fails or dies ends the run, and so does a standstill of
`STALL_TIMEOUT_S`. At the end all are killed, once what they measured is safe: PyTorch's own shutdown fails at times,
where rank 0 leaves before the others.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import socket
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed import rpc

from echelon import errors
from echelon.bench.rpc import coordinator
from echelon.bench.rpc.setting import Progress, Raw, Setting
from echelon.engines.process import Failure
from echelon.errors import ConfigError, EchelonError, RunError

STALL_TIMEOUT_S = 150.0  # longer than a call may take, so that the call that failed is what the user hears of
# More than about 18 ranks may meet at rank 0 faster than TensorPipe's shared memory transport takes them in
# (pytorch/pytorch#85607). Its TCP transport takes any number, at some three quarters of the throughput.
CROWDED = "connect: Resource temporarily unavailable"


def run(setting: Setting, progress: Progress) -> Raw:
    """Measures `setting` over torch.distributed.rpc."""
    if not (rpc.is_available() and hasattr(rpc, "TensorPipeRpcBackendOptions")):
        raise ConfigError(
            f"this build of PyTorch ({torch.__version__}) has no torch.distributed.rpc. Install one that has it, or "
            "use another --transport."
        )
    coordinator.check_port(setting)
    port = setting.master_port if int(setting.master_port) else free_port(setting.master_addr)
    setting = dataclasses.replace(setting, master_port=port)
    try:
        raw, transports = coordinator.run(setting, progress, RpcCoordinator), "default"
    except RunError as error:
        if CROWDED not in str(error):
            raise
        raw, transports = coordinator.run(setting, progress, OverTcp), "uv"
    return dataclasses.replace(raw, extra={"tensorpipe_transports": transports})


def free_port(address: str) -> str:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return str(probe.getsockname()[1])


class RpcCoordinator(coordinator.Coordinator):
    """Starts the ranks and watches over them; what coordinates the run is rank 0."""

    preload = ("echelon.bench.rpc.torch_rpc", "echelon.bench.rpc.torch_rank")
    over_tcp = False

    def drive(self) -> None:
        self._start("ranks", "echelon.bench.rpc.torch_rpc:Ranks", over_tcp=self.over_tcp)
        self._seen, self._seen_s = -1, time.monotonic()
        self._until(self._ended)

    def _ended(self) -> bool:
        answered = int(self.results.num_answered.sum())
        if answered != self._seen:
            self._seen, self._seen_s = answered, time.monotonic()
        elif time.monotonic() - self._seen_s > STALL_TIMEOUT_S:
            raise RunError(
                f"torch.distributed.rpc made no progress for {STALL_TIMEOUT_S:g} s, after {answered} of "
                f"{self.setting.num_requests} requests. Its ranks met at {self.setting.master_addr}:"
                f"{self.setting.master_port}; fewer observers (--world_size) may do."
            )
        return not self.working


class OverTcp(RpcCoordinator):
    """The same with TensorPipe's TCP transport alone."""

    over_tcp = True


class Ranks:
    """The role that holds the ranks: they are its children, in its session and its process group.

    One session matters: TensorPipe spins, giving way by sched_yield, and where the kernel shares out processor time by
    session (autogroups) that gives way only inside it. With a session each, the ranks had a fourth of the throughput.
    The group matters too: should this process be killed, the engine ends its group.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        from echelon.bench.rpc.torch_rank import work  # cannot be imported where PyTorch has no RPC

        self.folder, self.finished = Path(config["session"]), False
        fork = multiprocessing.get_context("fork")
        world_size = int(config["setting"]["world_size"])
        self.processes = {
            rank: fork.Process(target=work, args=(rank, config, os.getpid()), daemon=True) for rank in range(world_size)
        }
        for process in self.processes.values():
            process.start()

    def step(self, timeout_s: float) -> bool:
        """Waits until a rank ends: the coordinator because all is done, any other because it failed."""
        wait([process.sentinel for process in self.processes.values()], timeout_s)
        ended = [(rank, process.exitcode) for rank, process in self.processes.items() if process.exitcode is not None]
        if (0, 0) in ended:
            self.finished = True
        elif ended:
            raise self._error(dict(ended))
        return bool(ended)

    def _error(self, ended: dict[int, int]) -> EchelonError:
        """The cause: a rank that was killed, or the first that failed; the others only found their connection cut."""
        told = [path for rank in ended if (path := self.folder / failure_file(rank)).exists()]
        silent = [rank for rank in ended if self.folder / failure_file(rank) not in told]
        if silent:
            return RunError(how_ended(silent[0], ended[silent[0]]))
        return failure_from(min(told, key=lambda path: path.stat().st_mtime_ns))

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.join()


def name_of(rank: int) -> str:
    return "coordinator" if rank == 0 else "agent" if rank == 1 else f"observer{rank}"


def failure_file(rank: int) -> str:
    """Where a rank tells what ended it, in the session's folder."""
    return f"failure-{rank}"


def failure_from(path: Path) -> EchelonError:
    """What a rank tells of its end: one of Echelon's own errors as it was, any other with its traceback."""
    failure = Failure(**json.loads(path.read_bytes()))
    if failure.expected:
        kind: type[EchelonError] = getattr(errors, failure.kind)
        return kind(failure.message)
    rank = int(path.name.rpartition("-")[2])
    return RunError(f"{name_of(rank)} failed: {failure.kind}: {failure.message}\n\n{failure.traceback}")


def how_ended(rank: int, code: int) -> str:
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with code {code}"
    return f"{name_of(rank)} {how}, so the run is over."
