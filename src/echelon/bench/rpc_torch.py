"""`--transport torch-rpc`: the same workload over torch.distributed.rpc, written as its experienced users would.

One role starts the ranks: the coordinator (0), the agent (1) and the observers. Every rank uses PyTorch's public
defaults: TensorPipe, and 16 threads that serve calls. The coordinator calls every observer, and an observer calls the
agent once per state. With `batch` the agent keeps a request's future until all observers have sent one. There is no
RRef: one in the arguments of every call costs about a third of the throughput.

An observer waits for the agent's reply, at most `CALL_TIMEOUT_S`; the coordinator waits for the observers. A rank that
fails or dies ends the run, and so does a standstill. At the end all ranks are killed, after their measurements are
stored: the shutdown of torch.distributed.rpc sometimes fails, if rank 0 leaves before the others.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import os
import threading
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from echelon.bench import rpc_processes
from echelon.bench.harness import Progress
from echelon.bench.processes import ended, error_of, free_port
from echelon.bench.rpc import Raw, RpcSetting, check_port
from echelon.bench.rpc_processes import MEASURE, WARM_UP, BenchCoordinator, Observer, Results, Standstill
from echelon.engines.forkserver import die_with_parent, pack_failure
from echelon.engines.process import Failure, failure_of
from echelon.errors import ConfigError, EchelonError, RunError
from echelon.transport.secret import is_loopback

if TYPE_CHECKING:
    from echelon.bench.rpc_agent import CallAgent

CALL_TIMEOUT_S = 120.0
NUM_THREADS = 16  # PyTorch's default; no thread waits in a call, so 16 are enough for any number of observers
# More than about 18 ranks can connect to rank 0 faster than TensorPipe's shared-memory transport accepts them
# (pytorch/pytorch#85607). Its TCP transport accepts any number, at about three quarters of the throughput.
CROWDED = "connect: Resource temporarily unavailable"


def run(setting: RpcSetting, progress: Progress) -> Raw:
    """Measures `setting` over torch.distributed.rpc."""
    check_available("use another --transport")
    check_port(setting)
    if not int(setting.master_port):
        setting = dataclasses.replace(setting, master_port=str(free_port(setting.master_addr)))
    if setting.master_addr != "localhost" and not is_loopback(setting.master_addr):
        raw = rpc_processes.run(setting, progress, TorchCoordinatorBetweenHosts)
        return dataclasses.replace(raw, extra={"tensorpipe_transports": "uv", "tensorpipe_channels": "basic"})
    try:
        raw, transports = rpc_processes.run(setting, progress, TorchCoordinator), "default"
    except RunError as error:
        if CROWDED not in str(error):
            raise
        raw, transports = rpc_processes.run(setting, progress, TorchCoordinatorOverTcp), "uv"
    return dataclasses.replace(raw, extra={"tensorpipe_transports": transports})


def check_available(remedy: str) -> None:
    """Raises ConfigError if this build of PyTorch has no RPC."""
    if not (rpc.is_available() and hasattr(rpc, "TensorPipeRpcBackendOptions")):
        raise ConfigError(
            f"this build of PyTorch ({torch.__version__}) has no torch.distributed.rpc. Install one that has it, or "
            f"{remedy}."
        )


class TorchCoordinator(BenchCoordinator):
    """Starts and monitors the ranks; rank 0 coordinates the run."""

    preload = (__name__, "echelon.bench.rpc_agent")
    over_tcp = False
    copies = True

    def drive(self) -> None:
        standstill = Standstill("torch.distributed.rpc", self.results)
        self.start("ranks", f"{__name__}:Ranks", over_tcp=self.over_tcp, copies=self.copies)

        def is_over() -> bool:
            standstill.check()
            return not self.processes.working

        self.until(is_over)


class TorchCoordinatorOverTcp(TorchCoordinator):
    """The same with TensorPipe's TCP transport only."""

    over_tcp = True


class TorchCoordinatorBetweenHosts(TorchCoordinatorOverTcp):
    """The same as between hosts: tensors travel on the connection, too, not by copies between the processes."""

    copies = False


class Ranks:
    """The role that starts the ranks: they are its children, in its session and its process group.

    The shared session matters: TensorPipe spins and yields with sched_yield. If the kernel schedules by session
    (autogroups), a process yields only to others of its session; with separate sessions the ranks had a quarter of the
    throughput. The group matters, too: if this process is killed, the engine ends its group.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.folder, self.finished = Path(config["session"]), False
        fork = multiprocessing.get_context("fork")
        world_size = int(config["setting"]["world_size"])
        self.processes = {
            rank: fork.Process(target=work, args=(rank, config, os.getpid()), daemon=True) for rank in range(world_size)
        }
        for process in self.processes.values():
            process.start()

    def step(self, timeout_s: float) -> bool:
        """Waits until a rank ends: the coordinator at the end of the run, any other rank because it failed."""
        wait([process.sentinel for process in self.processes.values()], timeout_s)
        codes = {rank: process.exitcode for rank, process in self.processes.items() if process.exitcode is not None}
        if codes.get(0) == 0:
            self.finished = True
        elif codes:
            raise self._error(codes)
        return bool(codes)

    def _error(self, codes: dict[int, int]) -> EchelonError:
        """Returns the cause: a rank that was killed, or the first that failed; the others only lost a connection."""
        paths = {rank: failure_path(self.folder, rank) for rank in codes}
        silent = [rank for rank, path in paths.items() if not path.exists()]
        if silent:
            return RunError(ended(name_of(silent[0]), codes[silent[0]]))
        first = min(paths, key=lambda rank: paths[rank].stat().st_mtime_ns)
        return error_of(name_of(first), Failure(**json.loads(paths[first].read_bytes())))

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.join()


def name_of(rank: int) -> str:
    return "coordinator" if rank == 0 else "agent" if rank == 1 else f"observer{rank}"


def failure_path(folder: Path, rank: int) -> Path:
    """Returns the file in which a rank stores its error."""
    return folder / f"failure-{rank}"


def work(rank: int, config: dict[str, Any], parent: int) -> None:
    """Runs one rank: joins the others; then the coordinator measures, and the others serve calls."""
    die_with_parent(parent)
    folder = Path(config["session"])
    try:
        setting = RpcSetting(**config["setting"])
        results = Results(folder, setting)
        torch.set_num_threads(1)
        if rank == 1:
            from echelon.bench.rpc_agent import CallAgent

            Here.agent = CallAgent(setting, results)
        elif rank > 1:
            Here.observer = Observer(setting, results, rank - 2)
        join(rank, setting, over_tcp=config["over_tcp"], copies=config["copies"])
        if rank == 0:
            coordinate(setting, results)
        else:
            threading.Event().wait()  # threads of torch.distributed.rpc serve the calls
    except BaseException as error:  # the outermost frame of the process: every error is stored
        path = failure_path(folder, rank)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(pack_failure(failure_of(error)))
        temporary.rename(path)
        os._exit(1)
    os._exit(0)  # torch.distributed.rpc is not shut down


def join(rank: int, setting: RpcSetting, *, over_tcp: bool, copies: bool) -> None:
    """Joins the world as `rank`; returns when all ranks have joined.

    Without `copies`, no tensor is copied from process to process past the connection (TensorPipe's channel `cma`).
    """
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=NUM_THREADS,
        rpc_timeout=CALL_TIMEOUT_S,
        init_method=f"tcp://{setting.master_addr}:{setting.master_port}",
        _transports=["uv"] if over_tcp else None,
        _channels=None if copies else ["basic"],
    )
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        name_of(rank), rank=rank, world_size=setting.world_size, rpc_backend_options=options
    )


def coordinate(setting: RpcSetting, results: Results) -> None:
    """Runs both phases in all observers."""
    for phase in (WARM_UP, MEASURE):
        results.begin(phase)
        observers = [name_of(rank) for rank in range(2, setting.world_size)]
        calls = [rpc.rpc_async(name, observe, args=(phase,), timeout=0) for name in observers]  # 0: no timeout
        torch.futures.wait_all(calls)


class Here:
    """The process-wide objects that called functions use."""

    agent: CallAgent
    observer: Observer


def observe(phase: int) -> None:
    """Runs a phase in an observer; called by the coordinator."""
    observer = Here.observer
    state = torch.zeros(observer.setting.num_inputs)
    ask = ask_in_round if observer.setting.batch else ask_alone
    call = functools.partial(rpc.rpc_sync, "agent", ask, args=(observer.index, state))
    observer.observe(phase, state.numpy(), call)


@async_execution  # type: ignore[untyped-decorator]
def ask_in_round(index: int, state: torch.Tensor) -> Future[int]:
    """Adds a request to the round of the agent; called by an observer."""
    future: Future[int] = Future()
    Here.agent.join_round(index, state.numpy(), future)
    return future


def ask_alone(index: int, state: torch.Tensor) -> int:
    """Serves a single request in the agent; called by an observer."""
    return Here.agent.answer(state.numpy())
