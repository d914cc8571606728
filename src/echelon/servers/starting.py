"""Functions that start servers: every member calls the same function and gets its clients.

The first member stores the models and is the primary reducer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from echelon.errors import ConfigError
from echelon.servers.gradient import PushPullGradServer
from echelon.servers.gradient_member import PushPullGradServerImpl
from echelon.servers.model import PushPullModelServer
from echelon.servers.ordered import Ordered, OrderedServer, OrderedServerImpl
from echelon.world import RpcGroup
from echelon.world.world import world_here

Each = Any  # one value for all models, or a list with one for each


def model_server_helper(
    model_num: int, group_name: str = "model_server", members: str | Sequence[str] = "all"
) -> tuple[PushPullModelServer, ...]:
    """Starts the servers of `model_num` shared models and returns a client of each. All `members` call this."""
    if model_num < 1:
        raise ConfigError(f"model_server_helper: model_num={model_num} must be 1 or more.")
    group, first = _enter(group_name, members, "model_server_helper")
    is_home = group.get_cur_name() == first
    ordered: Ordered = OrderedServer(group_name, group)
    if is_home:
        ordered = OrderedServerImpl(group_name, group, version_depth=0)
    group.barrier()
    return tuple(PushPullModelServer(f"model_{i}", ordered) for i in range(model_num))


def grad_server_helper(
    model_creators: Sequence[Callable[[], nn.Module]],
    group_name: str = "grad_server",
    members: str | Sequence[str] = "all",
    optimizer: Callable[..., Optimizer] = Adam,
    learning_rate: float | Sequence[float] = 1e-3,
    optimizer_kwargs: Each = None,
    lr_scheduler: Callable[..., LRScheduler] | None = None,
    lr_scheduler_args: Sequence[Sequence[Any]] | None = None,
    lr_scheduler_kwargs: Sequence[Mapping[str, Any]] | None = None,
    *,
    reduce_method: str = "sum",
    reduce_device: str | torch.device = "cpu",
    reduce_batch_size: int = 4,
    max_queue_size: int = 64,
) -> tuple[PushPullGradServer, ...]:
    """Starts one gradient server for each of `model_creators` and returns a client of each.

    All `members` call this, and all of them are secondary reducers. `model_creators` are called on the first member
    only. `learning_rate`, `optimizer_kwargs` and the arguments of `lr_scheduler` may be lists with one entry for each
    model. The parameters are those of Machin's function and of its gradient server.
    """
    num = len(model_creators)
    if num == 0:
        raise ConfigError("grad_server_helper: model_creators is empty; pass a function for each model.")
    rates = _each("learning_rate", learning_rate, num)
    for rate in rates:
        check_rate(rate, "grad_server_helper")
    options = _each("optimizer_kwargs", optimizer_kwargs or {}, num)
    schedule_args = _entries("lr_scheduler_args", lr_scheduler_args, (), num)
    schedule_kwargs = _entries("lr_scheduler_kwargs", lr_scheduler_kwargs, {}, num)
    group, first = _enter(group_name, members, "grad_server_helper")
    servers = [
        PushPullGradServerImpl(
            f"{group_name}_{i}",
            group,
            primary_reducer=first,
            reduce_method=reduce_method,
            reduce_device=reduce_device,
            reduce_batch_size=reduce_batch_size,
            max_queue_size=max_queue_size,
        )
        for i in range(num)
    ]
    for i, server in enumerate(servers):
        if server.is_primary:
            model = model_creators[i]()
            trained = optimizer(model.parameters(), **{"lr": rates[i], **options[i]})
            schedule = None if lr_scheduler is None else lr_scheduler(trained, *schedule_args[i], **schedule_kwargs[i])
            server.manage_model(model, trained, schedule)
        server.start()
    group.barrier()
    return tuple(server.accessor for server in servers)


def _enter(group_name: str, members: str | Sequence[str], caller: str) -> tuple[RpcGroup, str]:
    """Creates the group of the servers; returns it and its first member."""
    world = world_here(caller)
    if isinstance(members, str) and members != "all":
        raise ConfigError(f"{caller}: members={members!r} must be 'all' or a list of names.")
    names = world.get_members() if isinstance(members, str) else list(members)
    if not names:
        raise ConfigError(f"{caller}: members is empty.")
    return world.create_rpc_group(group_name, names), names[0]


def check_rate(rate: Any, what: str) -> None:
    """Raises ConfigError unless `rate` is a learning rate: a finite number, 0 or more, or a tensor of one."""
    is_number = isinstance(rate, int | float) and math.isfinite(rate) and rate >= 0
    if not is_number and not isinstance(rate, torch.Tensor):
        raise ConfigError(f"{what}: learning_rate={rate!r} does not fit: expected a finite number, 0 or more.")


def _each(name: str, given: Each, num: int) -> list[Any]:
    """Returns one value for each model."""
    if isinstance(given, (list, tuple)):
        return _entries(name, given, None, num)
    return [given] * num


def _entries(name: str, given: Sequence[Any] | None, default: Any, num: int) -> list[Any]:
    if given is None:
        return [default] * num
    if len(given) != num:
        raise ConfigError(f"grad_server_helper: {name} has {len(given)} entries for {num} models; pass one for each.")
    return list(given)
