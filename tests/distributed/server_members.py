"""Scenarios of the server tests, which the members of a world run; each returns its findings."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from echelon.errors import EchelonError
from echelon.servers import (
    OrderedServer,
    OrderedServerImpl,
    PushPullGradServer,
    PushPullGradServerImpl,
    PushPullModelServer,
    PushPullModelServerImpl,
    grad_server_helper,
    model_server_helper,
)
from echelon.servers.gradient_member import MAX_UNDER_WAY
from echelon.world import World

PATIENCE_S = 120.0


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.01)


def error_of(call: Callable[[], Any]) -> str:
    """Returns the type and message of the error that `call` raises."""
    try:
        call()
    except (EchelonError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def net(width: int = 3) -> nn.Module:
    """Returns a model whose weights are all 0."""
    model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def values(model: nn.Module) -> list[float]:
    """Returns the distinct values of the parameters of `model`."""
    return sorted({round(float(x), 6) for parameter in model.parameters() for x in parameter.detach().reshape(-1)})


def shift(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


def push_gradient(server: PushPullGradServer, model: nn.Module, value: float, pull: bool = False) -> bool:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return server.push(model, pull)


# Servers.


def ordered(world: World) -> dict[str, Any]:
    """Member 0 has the server; the others push from the same version, one after the other."""
    group = world.create_rpc_group("ordered", world.members)
    if world.rank == 0:
        OrderedServerImpl("plain", group)
        OrderedServerImpl("shallow", group, version_depth=0)
    group.barrier()
    plain, shallow = OrderedServer("plain", group), OrderedServer("shallow", group)
    found: dict[str, Any] = {"before": plain.pull("k")}
    value = torch.tensor([float(world.rank)])
    for rank in range(world.world_size):
        group.barrier()
        if rank == world.rank:
            found["pushed"] = plain.push("k", {"x": value}, rank + 1, 0)
            previous = f"v{rank - 1}" if rank else None
            found["first"] = [server.push("all", rank, f"v{rank}", previous) for server in (plain, shallow)]
    value.add_(100.0)
    group.barrier()
    pulled = plain.pull("k")
    assert pulled is not None
    found["pulled"] = (float(pulled[0]["x"]), pulled[1])
    found["old"] = plain.pull("k", 7)
    wanted = [f"v{rank}" for rank in range(world.world_size)] + [None]
    found["versions"] = [[server.pull("all", version) for version in wanted] for server in (plain, shallow)]
    found["newer"] = (plain.newer("k", 1), plain.newer("absent", 1))
    found["again"] = plain.push("all", 9, "v2", "v2")
    found["taken"] = error_of(lambda: OrderedServerImpl("plain", group))
    return found


def shared_model(world: World) -> dict[str, Any]:
    """Two models of a server: member 1 pushes one, then member 2, which has to pull first."""
    servers = model_server_helper(model_num=2)
    group = servers[0].o_server.group  # type: ignore[attr-defined]
    model, found = net(), dict[str, Any]()
    found["nothing"] = servers[0].pull(model)
    group.barrier()
    if world.rank == 1:
        shift(model, 1.0)
        found["pushed"] = servers[0].push(model)
    group.barrier()
    if world.rank == 2:
        shift(model, 5.0)
        found["conflict"] = (servers[0].push(nn.DataParallel(model)), values(model), servers[0].version(model))
        shift(model, 1.0)
        found["pushed"] = servers[0].push(model)
    group.barrier()
    found["pulled"] = (servers[0].pull(model), values(model), servers[0].version(model), servers[1].pull(model))
    shift(model, 9.0)
    found["not newer"] = (servers[0].pull(model), values(model))
    found["misfit"] = error_of(lambda: servers[0].pull(net(4)))
    group.barrier()
    if world.rank == 1:
        again = nn.DataParallel(net())  # a restarted learner: it ignores the weights of others
        shift(again, 7.0)
        found["refused"] = (servers[0].push(again, pull_on_fail=False), values(again), servers[0].version(again))
        found["pushed again"] = [servers[0].push(again, pull_on_fail=False) for _ in range(2)]
    group.barrier()
    found["at last"] = (servers[0].pull(model), values(model), servers[0].version(model))
    found["twice"] = error_of(lambda: model_server_helper(model_num=1))
    return found


def by_hand(world: World) -> dict[str, Any]:
    """A model and a gradient server without the helper functions; member 2 is no reducer."""
    group = world.create_rpc_group("by hand", world.members)
    found: dict[str, Any] = {}
    if world.rank == 0:
        home = PushPullModelServerImpl("models", group, "m")
        home.accessor.push(net())
    if world.rank < 2:
        impl = PushPullGradServerImpl("g", group, "m", "0", ["1"], reduce_batch_size=2, max_queue_size=4)
        if world.rank == 0:
            found["early"] = error_of(impl.start)
            model = net()
            impl.manage_model(model, torch.optim.SGD(model.parameters(), lr=1.0))
            impl.start()
        else:
            found["managed"] = error_of(lambda: impl.manage_model(net(), torch.optim.SGD(net().parameters(), lr=1.0)))
    group.barrier()
    found["pulled"] = PushPullModelServer("m", OrderedServer("models", group)).pull(net())
    server = PushPullGradServer("g", group, "m", ["1"])
    if world.rank == 2:
        model = net()
        for number in range(10):  # no reduction: the last 4 are kept
            push_gradient(server, model, float(number))
        found["dropped"], found["stats"] = server.dropped(), server.stats()["1"]
        found["misfit"] = error_of(lambda: push_gradient(server, net(5), 1.0))
        found["no gradient"] = error_of(lambda: server.push(model))
    group.barrier()
    if world.rank == 1:
        impl.start()  # 6 + 7 and 8 + 9 are sent to 0, which sums them
        found["again"] = error_of(impl.start)
    group.barrier()
    wait_until(lambda: server.stats()["0"]["steps"] == 1)
    model = net()
    found["after"] = (server.pull(model), values(model), server.version(model))
    group.barrier()
    return found


def gradients(world: World, method: str) -> dict[str, Any]:
    """Every member pushes 16 gradients of its own value to two models with learning-rate schedules."""
    servers = grad_server_helper(
        [net, lambda: net(4)],
        f"grad_server_{method}",
        optimizer=torch.optim.SGD,
        learning_rate=[0.5, 1.0],
        lr_scheduler=torch.optim.lr_scheduler.StepLR,
        lr_scheduler_args=[(1, 1.0), (1, 0.5)],
        reduce_method=method,
    )
    models = [net(), net(4)]
    found: dict[str, Any] = {"at first": [server.pull(model) for server, model in zip(servers, models, strict=True)]}
    for _ in range(16):
        push_gradient(servers[0], models[0], world.rank + 1.0)
        push_gradient(servers[1], models[1], 1.0, pull=True)
    wait_until(lambda: all(server.stats()["0"]["steps"] == 3 for server in servers))
    found["pulled"] = [server.pull(model) for server, model in zip(servers, models, strict=True)]
    found["values"] = [values(model) for model in models]
    found["versions"] = [server.version(model) for server, model in zip(servers, models, strict=True)]
    found["reduced"] = {member: counts["reduced"] for member, counts in servers[0].stats().items()}
    found["dropped"] = servers[0].dropped()
    servers[0].watch()
    return found


class Held(torch.optim.SGD):
    """Blocks until it is released."""

    let_go = threading.Event()

    def step(self, closure: Any = None) -> Any:
        assert self.let_go.wait(PATIENCE_S)
        return super().step(closure)


def flooded(world: World) -> dict[str, Any]:
    """Every member pushes 100 gradients of 1 while the optimizer blocks: the primary reducer's queue overflows."""
    (server,) = grad_server_helper(
        [net], "flooded", optimizer=Held, learning_rate=1.0, reduce_batch_size=2, max_queue_size=4
    )
    model = net()
    for _ in range(100):
        push_gradient(server, model, 1.0)
    server.group.barrier()
    Held.let_go.set()

    def is_over() -> bool:
        of = server.stats()["0"]
        return of["primary_pushed"] == 150 and of["primary_queued"] < 2 and of["steps"] == of["primary_reduced"] // 2

    wait_until(is_over)
    server.pull(model)
    found = {"stats": server.stats(), "dropped": server.dropped(), "values": values(model)}
    server.group.barrier()
    return found


def held_up(world: World) -> dict[str, int]:
    """Member 1 pushes while the primary reducer's process does not reply: it waits, and nothing is dropped."""
    (server,) = grad_server_helper([net], "held up", reduce_batch_size=2, max_queue_size=4)
    group, let_go = server.group, threading.Event()
    if world.rank == 0:
        group.register("hold", lambda: let_go.wait(PATIENCE_S))
        group.register("let go", let_go.set)
    group.barrier()
    if world.rank == 1:
        model = net()
        push_gradient(server, model, 1.0)  # asks for the shapes, once
        held = group.registered_async("hold")  # calls of one caller are served in order
        for _ in range(99):
            push_gradient(server, model, 1.0)
        held.wait()
    if world.rank == 2:
        wait_until(lambda: server.stats()["1"]["under_way"] == MAX_UNDER_WAY + 1)  # one is next
        group.registered_sync("let go")
    group.barrier()
    wait_until(lambda: server.stats()["0"]["primary_pushed"] == 50)
    return server.stats()["1"]


def late(world: World) -> dict[str, Any]:
    """The primary reducer replies to member 1 too late: that push raises, nothing is lost, others continue."""
    (server,) = grad_server_helper([net], "late", reduce_batch_size=2, max_queue_size=64)
    group, let_go, is_late = server.group, threading.Event(), threading.Event()
    if world.rank == 0:
        group.register("hold", lambda: let_go.wait(PATIENCE_S))
        group.register("let go", let_go.set)
    if world.rank == 2:
        group.register("late", is_late.set)
    group.barrier()
    found: dict[str, Any] = {}
    if world.rank == 1:
        model, held_s = net(), world.timeout_s
        for _ in range(2):  # so that it knows the reducers before its timeout is short
            push_gradient(server, model, 1.0)
        held = group.registered_async("hold")  # calls of one caller are served in order
        world.timeout_s = 0.5
        found["raised"] = [error_of(lambda: [push_gradient(server, model, 1.0) for _ in range(40)]) for _ in range(2)]
        world.timeout_s = held_s
        group.registered_sync("late")
        held.wait()
        push_gradient(server, model, 1.0)
    if world.rank == 2:
        assert is_late.wait(PATIENCE_S)
        group.registered_sync("let go")
    group.barrier()
    found["member"] = server.stats()["1"]
    wait_until(lambda: server.stats()["0"]["primary_pushed"] == found["member"]["reduced"] // 2)
    server.watch()
    group.barrier()
    return found


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ArithmeticError("the optimizer is out of order")


def failing(world: World) -> str:
    """The optimizer fails in the primary reducer; later pushes raise its error."""
    (server,) = grad_server_helper([net], "failing", optimizer=Failing, reduce_batch_size=1)

    def push_on() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            push_gradient(server, net(), 1.0)

    raised = error_of(push_on)
    assert "out of order" in error_of(server.watch)
    server.group.barrier()
    return raised
