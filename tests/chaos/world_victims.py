"""Two observers wait for a victim in every way while it is killed or suspended, and report their errors.

python world_victims.py: all members are forks of this process. Ranks 0 and 1 observe; each scenario has its own victim.
The observers print a line of JSON: name of the scenario -> type and text of the error, and after how many seconds of
waiting it was raised.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from echelon.errors import EchelonError
from echelon.frames.modules import among_learners, call
from echelon.world import CollectiveGroup, RpcGroup, World

TIMEOUT_S = 240.0  # for operations that must notice a death, and for victims until it is their turn
NOTICED_S = 60.0  # longer than any wait
SHORT_S = 0.5  # for operations that must time out
SHORT_COLLECTIVE_S = 8.0  # the same, if the group has to be created within that time, too
OBSERVERS = ("observer-0", "observer-1")
DELAY_S = 0.1  # from the start of a wait to the kill; sound whatever it is
LARGE = 1 << 24  # bytes: more than any queue holds


def pid() -> int:
    return os.getpid()


def wait_for_ever() -> None:
    threading.Event().wait()


@dataclass(frozen=True)
class Scene:
    """The objects that an observer has when its wait starts."""

    world: World
    rpc: RpcGroup
    victim: str
    rank: int  # of the victim
    timeout_s: float
    collective: CollectiveGroup | None = None
    model: torch.nn.Module | None = None

    @property
    def group(self) -> CollectiveGroup:
        assert self.collective is not None
        return self.collective

    @property
    def is_first(self) -> bool:
        return self.world.rank == 0

    def room(self) -> list[torch.Tensor]:
        return [torch.zeros(4) for _ in range(3)]


@dataclass(frozen=True)
class Scenario:
    """A way to wait, and the signal that the victim receives meanwhile."""

    name: str
    wait: Callable[[Scene], Any]
    collective: bool = False
    signal: signal.Signals = signal.SIGKILL
    wrapped: bool = False  # all have a model whose gradients use the collective group
    stopped: bool = False  # before the wait begins
    alone: bool = False  # the second observer does nothing

    @property
    def timeout_s(self) -> float:
        if self.signal == signal.SIGKILL:
            return TIMEOUT_S
        return SHORT_COLLECTIVE_S if self.collective else SHORT_S


def call_through(rpc: str, victim: str) -> None:
    GROUPS[rpc].rpc_sync(victim, wait_for_ever)


def calls_through(scene: Scene) -> None:
    other = OBSERVERS[1 - scene.world.rank]
    scene.rpc.rpc_sync(other, call_through, args=(scene.rpc.get_group_name(), scene.victim))


def makes_a_group(scene: Scene) -> None:
    scene.world.create_rpc_group("never", [*OBSERVERS, scene.victim])


def makes_a_collective_group(scene: Scene) -> None:
    scene.world.create_collective_group([0, 1, scene.rank], timeout=scene.timeout_s)


def begins_a_send(scene: Scene) -> None:
    operation = scene.group.isend(torch.zeros(LARGE), scene.rank)
    operation.wait()


def begins_an_all_reduce(scene: Scene) -> None:
    operation = scene.group.all_reduce(torch.zeros(4), async_op=True)
    assert operation is not None
    operation.wait()


def shares_gradients(scene: Scene) -> None:
    assert scene.model is not None
    value = call(scene.model, {"input": torch.ones(2, 4)})
    with among_learners(scene.model):
        value.sum().backward()


def sends_large(scene: Scene) -> None:
    while True:
        scene.rpc.rpc_sync(scene.victim, total, args=(torch.zeros(LARGE, dtype=torch.uint8),))


def total(tensor: torch.Tensor) -> int:
    return int(tensor.sum())


GROUPS: dict[str, RpcGroup] = {}
RPC: dict[str, Callable[[Scene], Any]] = {
    "rpc barrier": lambda scene: scene.rpc.barrier(scene.timeout_s),
    "rpc_sync": lambda scene: scene.rpc.rpc_sync(scene.victim, wait_for_ever, scene.timeout_s),
    "rpc_async": lambda scene: scene.rpc.rpc_async(scene.victim, wait_for_ever, scene.timeout_s).wait(),
    "remote": lambda scene: scene.rpc.remote(scene.victim, wait_for_ever, scene.timeout_s).to_here(),
    "registered_sync": lambda scene: scene.rpc.registered_sync("wait", timeout=scene.timeout_s),
    "registered_async": lambda scene: scene.rpc.registered_async("wait", timeout=scene.timeout_s).wait(),
    "registered_remote": lambda scene: scene.rpc.registered_remote("wait", timeout=scene.timeout_s).to_here(),
}
COLLECTIVE: dict[str, Callable[[Scene], Any]] = {
    "all_reduce": lambda scene: scene.group.all_reduce(torch.zeros(4)),
    "barrier": lambda scene: scene.group.barrier(),
    "broadcast": lambda scene: scene.group.broadcast(torch.zeros(4), scene.rank),
    "reduce": lambda scene: scene.group.reduce(torch.zeros(4), scene.world.rank),
    "all_gather": lambda scene: scene.group.all_gather(scene.room(), torch.zeros(4)),
    "gather": lambda scene: scene.group.gather(torch.zeros(4), scene.room(), dst=scene.world.rank),
    "scatter": lambda scene: scene.group.scatter(torch.zeros(4), src=scene.rank),
    "recv": lambda scene: scene.group.recv(torch.zeros(4), scene.rank),
    "recv from anybody": lambda scene: scene.group.recv(torch.zeros(4)),
    "send": lambda scene: scene.group.send(torch.zeros(LARGE), scene.rank),
    "isend": begins_a_send,
    "irecv": lambda scene: scene.group.irecv(torch.zeros(4), scene.rank).wait(),
    "all_reduce, begun": begins_an_all_reduce,
}
SCENARIOS = [
    *(Scenario(name, wait) for name, wait in RPC.items()),
    Scenario("a call through another", calls_through),
    Scenario("get_paired", lambda scene: scene.rpc.get_paired("value").to_here(), stopped=True),
    Scenario("sends large", sends_large),
    Scenario("create_rpc_group", makes_a_group),
    Scenario("create_collective_group", makes_a_collective_group),
    *(Scenario(name, wait, collective=True) for name, wait in COLLECTIVE.items()),
    Scenario("gradients of a wrapped model", shares_gradients, collective=True, wrapped=True),
    *(Scenario(f"stopped {name}", RPC[name], signal=signal.SIGSTOP) for name in ("rpc barrier", "rpc_sync", "remote")),
    *(
        Scenario(f"stopped {name}", COLLECTIVE[name], collective=True, signal=signal.SIGSTOP, alone=True)
        for name in ("recv", "recv from anybody")
    ),
    Scenario("stopped all_reduce", COLLECTIVE["all_reduce"], collective=True, signal=signal.SIGSTOP),
]


def prepare(world: World, number: int) -> Scene:
    """Runs the common preparation of the observers and the victim of a scenario."""
    scenario, rank = SCENARIOS[number], 2 + number
    victim = world.name_of(rank)
    rpc = GROUPS[scenario.name] = world.create_rpc_group(scenario.name, [*OBSERVERS, victim])
    if world.name == victim:
        rpc.pair("value", torch.zeros(4))
        rpc.register("wait", wait_for_ever)
    timeout_s = scenario.timeout_s
    collective = world.create_collective_group([0, 1, rank], timeout=timeout_s) if scenario.collective else None
    model = None
    if scenario.wrapped and collective is not None:
        model = DistributedDataParallel(torch.nn.Linear(4, 1), process_group=collective.group)
    rpc.barrier()
    return Scene(world, rpc, victim, rank, timeout_s, collective, model)


def observe(world: World, number: int, observers: RpcGroup) -> tuple[str, str, float]:
    """Returns the type and text of the outcome, and how long it took."""
    scenario = SCENARIOS[number]
    scene = prepare(world, number)
    number_of_process = scene.rpc.rpc_sync(scene.victim, pid)
    observers.barrier()  # both have sent their request
    if scene.is_first and scenario.stopped:
        os.kill(number_of_process, signal.SIGSTOP)
    observers.barrier()
    killer = threading.Timer(DELAY_S, os.kill, (number_of_process, scenario.signal))
    if scene.is_first:
        killer.start()
    kind, text, begun_s = "nothing", "", time.monotonic()
    try:
        if scene.is_first or not scenario.alone:
            scenario.wait(scene)
    except EchelonError as error:
        kind, text = type(error).__name__, str(error)
    waited_s = time.monotonic() - begun_s
    observers.barrier()
    if scene.is_first:
        killer.join()
        if scenario.signal == signal.SIGSTOP:
            os.kill(number_of_process, signal.SIGKILL)
    return kind, text, waited_s


def run(rank: int, size: int) -> None:
    name = OBSERVERS[rank] if rank < 2 else f"victim-{rank}"
    world = World(name, rank, size, timeout_s=TIMEOUT_S)
    if rank >= 2:
        scene = prepare(world, rank - 2)  # releasing the group closes it
        wait_for_ever()
        del scene
    observers = world.create_rpc_group("observers", OBSERVERS)
    told = {scenario.name: observe(world, number, observers) for number, scenario in enumerate(SCENARIOS)}
    world.stop()
    os.write(1, f"{json.dumps(told)}\n".encode())  # in one write


def main() -> int:
    size = 2 + len(SCENARIOS)
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            run(rank, size)
            return 0
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return max(codes[:2])


if __name__ == "__main__":
    sys.exit(main())
