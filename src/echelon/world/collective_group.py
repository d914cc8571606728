"""Collective groups: tensor operations of torch.distributed among some of the world's processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from echelon.errors import EchelonError, PeerLost, TransportError, TransportTimeout, WorldError
from echelon.world.operation import ANY_SOURCE, CollectiveMembers, GroupHealth, Operation
from echelon.world.process_group import end_process_group, make_process_group
from echelon.world.store import WorldStore

if TYPE_CHECKING:
    from echelon.world.world import World

Launch = Callable[[dist.ProcessGroup], Any]  # starts an operation and returns its Work

_healths: dict[dist.ProcessGroup, GroupHealth] = {}  # of the groups that exist


@contextmanager
def explaining(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Replaces torch's error for a broken connection of `group` by the world's, in code where torch uses the group.

    The error is PeerLost, which names the member that died, or WorldStopped. torch's error names only an address.
    """
    begun = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        health = _healths.get(group)
        if health is None or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise health.verdict(what, error, 0, time.monotonic() - begun) from error


class CollectiveGroup:
    """Some of the world's processes, for operations on tensors that all of them enter in the same order.

    All ranks are world ranks. The group's timeout bounds every operation: it completes, or it raises PeerLost with the
    name of a member that died, WorldStopped, or TransportTimeout with the names of the members that have not entered,
    as far as the host knows them. After such an error the group is broken and every operation raises immediately;
    `destroy` the group and create another one. Operations with `async_op=True`, `isend` and `irecv` return an
    `Operation`; `wait` for it in the thread that started it.

    gloo accepts tensors on the CPU and on GPUs; nccl accepts tensors on a GPU, one GPU per member. With nccl, as
    everywhere in torch, `wait` returns when the operation is queued on the GPU's stream. The death of a member then
    appears as torch's own error, after the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup, health: GroupHealth) -> None:
        """Use `World.create_collective_group` instead."""
        self._group: dist.ProcessGroup | None = group
        self._health = health
        self._roster = health.roster
        self._num_entered = 0  # collective operations so far; the same in all members
        _healths[group] = health

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, for example for DistributedDataParallel."""
        if self._group is None:
            raise RuntimeError(f"{self._roster} was destroyed. Create another one.")
        return self._group

    @property
    def ranks(self) -> list[int]:
        return list(self._roster.ranks)

    def size(self) -> int:
        """Returns the number of members."""
        return len(self._roster.ranks)

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Sends `tensor` to rank `dst`, which must call `recv`; returns when the tensor may be changed."""
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receives into `tensor` from rank `src`, by default from the first sender; returns the sender's rank."""
        source = self.irecv(tensor, src, tag).wait()
        assert source is not None
        return source

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Operation:
        inner = self._other(dst)
        return self._start(f"send() to rank {dst}", lambda group: group.send([tensor], inner, tag), peer=dst)

    def irecv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> Operation:
        """Starts a `recv`; `wait()` returns the sender's rank."""
        if src is None:
            if self._roster.backend == "nccl":
                raise RuntimeError(
                    f"recv() in {self._roster} names no sender, which nccl requires. Pass the rank that sends, or "
                    "create the group with backend='gloo'."
                )
            return self._start(
                "recv() from any rank", lambda group: group.recv_anysource([tensor], tag), peer=ANY_SOURCE
            )
        inner = self._other(src)
        return self._start(f"recv() from rank {src}", lambda group: group.recv([tensor], inner, tag), peer=src)

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool = False) -> Operation | None:
        """Copies the `tensor` of rank `src` to all members, in place."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self._roster.inner(src), 0
        return self._enter("broadcast()", lambda group: group.broadcast([tensor], options), async_op)

    def all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, async_op: bool = False
    ) -> Operation | None:
        """Computes the sum (or `op`) of all tensors on all members, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        return self._enter("all_reduce()", lambda group: group.allreduce([tensor], options), async_op)

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> Operation | None:
        """Computes the sum (or `op`) of all tensors on rank `dst`, in place; the other tensors may be overwritten."""
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank, options.rootTensor = dist.ReduceOp(op), self._roster.inner(dst), 0
        return self._enter("reduce()", lambda group: group.reduce([tensor], options), async_op)

    def all_gather(
        self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, async_op: bool = False
    ) -> Operation | None:
        """Fills the `tensor_list` of all members with one tensor of each member, in rank order."""
        self._check_list("tensor_list", tensor_list)
        return self._enter("all_gather()", lambda group: group.allgather([tensor_list], [tensor]), async_op)

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: list[torch.Tensor] | None = None,
        dst: int = 0,
        async_op: bool = False,
    ) -> Operation | None:
        """Fills the `gather_list` of rank `dst` with one tensor of each member, in rank order."""
        options = dist.GatherOptions()
        options.rootRank = self._roster.inner(dst)
        lists = [self._check_list("gather_list", gather_list)] if dst == self._roster.rank else []
        return self._enter("gather()", lambda group: group.gather(lists, [tensor], options), async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: list[torch.Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
    ) -> Operation | None:
        """Fills each member's `tensor` from the `scatter_list` of rank `src`, in rank order."""
        options = dist.ScatterOptions()
        options.rootRank = self._roster.inner(src)
        lists = [self._check_list("scatter_list", scatter_list)] if src == self._roster.rank else []
        return self._enter("scatter()", lambda group: group.scatter([tensor], lists, options), async_op)

    def barrier(self, async_op: bool = False) -> Operation | None:
        """Waits until every member has entered the barrier."""
        options = dist.BarrierOptions()
        if self._roster.backend == "nccl":  # by default nccl derives the GPU from the rank
            options.device = torch.device("cuda", torch.cuda.current_device())
        return self._enter("barrier()", lambda group: group.barrier(options), async_op)

    def destroy(self) -> None:
        """Leaves the group without waiting for the others; idempotent."""
        if self._group is not None:
            end_process_group(self._group)
            _healths.pop(self._group, None)
            self._group = None
            with suppress(EchelonError):  # if the host does not reply, only a few bytes remain there
                self._health.leave()

    def _other(self, rank: int) -> int:
        if rank == self._roster.rank:
            raise RuntimeError(f"rank {rank} of {self._roster} cannot send to or receive from itself.")
        return self._roster.inner(rank)

    def _check_list(self, what: str, tensors: list[torch.Tensor] | None) -> list[torch.Tensor]:
        if tensors is None or len(tensors) != self.size():
            have = "nothing" if tensors is None else f"{len(tensors)} tensors"
            raise RuntimeError(
                f"{what} of {self._roster} takes a tensor for each of {self.size()} members, not {have}."
            )
        return tensors

    def _enter(self, what: str, launch: Launch, async_op: bool) -> Operation | None:
        """Starts an operation of all members; waits for it unless `async_op` is set."""
        self._num_entered += 1
        operation = self._start(what, launch, number=self._num_entered)
        if async_op:
            return operation
        operation.wait()
        return None

    def _start(self, what: str, launch: Launch, *, number: int = 0, peer: int | None = None) -> Operation:
        group = self.group
        return Operation(self._health, what, lambda: launch(group), number=number, peer=peer)


def enter_collective_group(
    world: World, ranks: Sequence[int], timeout_s: float, backend: str, hostname: str
) -> CollectiveGroup:
    """Creates a group of `ranks`; only those ranks call this, and the n-th completed call of each makes the same group.

    `hostname` is the address at which the others reach this host.
    """
    ordered = tuple(sorted(set(ranks)))
    names = tuple(world.name_of(rank) for rank in ordered)
    if world.rank not in ordered or len(ordered) < len(ranks):
        raise WorldError(
            f"rank {world.rank} is not in the collective group of ranks {list(ranks)}, or a rank appears twice in it. "
            "Only the members of a group create it; name each rank once."
        )
    number = world.num_collective[ordered] + 1
    roster = CollectiveMembers(
        f"{'-'.join(map(str, ordered))}.{number}", ordered, names, world.rank, timeout_s, backend
    )

    def watch() -> None:
        if lost := health.lost("create_collective_group()"):
            raise lost

    def count() -> None:
        world.num_collective[ordered] = number

    store = WorldStore(partial(world.control, "store"), timeout_s=timeout_s, watch=watch)
    health = GroupHealth(roster, store, world.why_lost)
    inner = ordered.index(world.rank)
    begun = time.monotonic()
    try:
        group = make_process_group(
            store,
            roster.name,
            inner,
            names,
            backend=backend,
            hostname=hostname,
            timeout_s=timeout_s,
            watch=watch,
            on_met=count,
        )
    except (PeerLost, TransportTimeout):
        raise
    except TransportError as error:  # gloo's error: the world has the details
        raise health.verdict("create_collective_group()", error, 0, time.monotonic() - begun) from error
    return CollectiveGroup(group, health)
