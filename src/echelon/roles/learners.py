"""The process group of the learners of a run, which they form through the coordinator's node.

Every call waits until all learners have made it. If a learner dies or is suspended, the others raise PeerLost or are
killed by the supervisor, which restarts all of them.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from echelon.algorithms.peers import ALONE, Peers
from echelon.errors import PeerLost
from echelon.roles.context import COORDINATOR, Context
from echelon.roles.plan.placement import have_own_gpus
from echelon.world.node import Node
from echelon.world.process_group import make_process_group
from echelon.world.store import WorldStore

SMALL = 1 << 18  # bytes over all learners: below this, an all-gather and a local sum are faster than an all-reduce


class Learners:
    """Peers in separate processes: NCCL between GPUs, gloo otherwise."""

    def __init__(self, names: list[str], rank: int, group: Any, on_gpu: Any = None) -> None:
        """`on_gpu` is the group for tensors on GPUs, if each learner has its own GPU."""
        self.names, self.rank, self.size = names, rank, len(names)
        self.spent_s = 0.0  # in calls, including waiting for the others
        self._group, self._on_gpu = group, on_gpu or group

    def gather(self, x: Tensor) -> Tensor:
        start = time.perf_counter()
        each = x.new_empty(self.size, *x.shape)
        self._finish(self._group_of(x).allgather, [list(each.unbind())], [x.contiguous()])
        self.spent_s += time.perf_counter() - start
        return each

    def add_up(self, x: Tensor) -> None:
        if x.device.type == "cpu" and x.nbytes * self.size <= SMALL:
            torch.sum(self.gather(x), 0, out=x)
            return
        start = time.perf_counter()
        self._finish(self._group_of(x).allreduce, [x])
        self.spent_s += time.perf_counter() - start

    def take_first(self, x: Tensor) -> None:
        start = time.perf_counter()
        self._finish(self._group_of(x).broadcast, x, 0)
        self.spent_s += time.perf_counter() - start

    def _group_of(self, x: Tensor) -> Any:
        return self._on_gpu if x.device.type == "cuda" else self._group

    def _finish(self, operation: Any, *args: Any) -> None:
        try:
            operation(*args).wait()
        except RuntimeError as error:  # gloo and NCCL raise no more specific type
            me, others = self.names[self.rank], ", ".join(self.names[: self.rank] + self.names[self.rank + 1 :])
            raise PeerLost(f"{me} waited for {others}, but the connection was lost: {error}.") from error


def join_learners(context: Context, node: Node, device: torch.device) -> Peers:
    """Waits until all learners of the run have joined and returns them; ALONE if the run has one learner.

    This learner learns on `device`.
    """
    config, names = context.train, context.train.learner_names
    if len(names) == 1:
        return ALONE
    # Longer than the supervisor's timeouts: it finds the hung learner before a process group gives up.
    wait_s = 2.0 * config.supervision.start_timeout_s
    store = WorldStore(partial(node.call, COORDINATOR, "store"), timeout_s=wait_s, one_thread=True)

    def make(backend: str) -> Any:
        name = f"learners-{context.incarnation}-{backend}"
        hostname = context.hostname
        return make_process_group(
            store, name, context.index, names, backend=backend, hostname=hostname, timeout_s=wait_s
        )

    own = not config.is_spread and have_own_gpus(config.learner, device)  # one host does not know the GPUs of another
    return Learners(names, context.index, make("gloo"), make("nccl") if own else None)
