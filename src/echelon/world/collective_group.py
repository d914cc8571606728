"""Collective groups: tensors among some of the world's processes, by torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from echelon.errors import EchelonError, PeerLost, TransportError, TransportTimeout, WorldError
from echelon.world.operation import ANYBODY, Circle, CollectiveMembers, Operation
from echelon.world.process_group import end_process_group, make_process_group
from echelon.world.store import WorldStore

if TYPE_CHECKING:
    from echelon.world.world import World

Launch = Callable[[dist.ProcessGroup], Any]  # starts an operation: its Work

_circles: dict[dist.ProcessGroup, Circle] = {}  # of the groups that are there


@contextmanager
def explaining(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Around what torch itself does with a world's `group`: where a connection broke, raises what the world knows.

    That is PeerLost naming who died, or WorldStopped; torch would say which address closed its connection.
    """
    begun = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        circle = _circles.get(group)
        if circle is None or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise circle.verdict(what, error, 0, time.monotonic() - begun) from error


class CollectiveGroup:
    """Some of the world's processes, for operations on tensors that all of them enter in the same order.

    Ranks are world ranks everywhere. Every operation is bounded by the group's timeout: it ends, raises PeerLost naming
    a member that died, WorldStopped, or TransportTimeout naming who has not entered, as far as they can be asked. After
    such an error the group is broken and says so at once; `destroy` it and make another one. Operations with
    `async_op=True`, `isend` and `irecv` return an `Operation`; `wait` for it in the thread that started it.

    Tensors lie where the backend works: gloo takes those of the CPU and of GPUs, nccl those of a GPU, one GPU a member.
    With nccl an operation is over for this process when the GPU's stream has it, as everywhere in torch: who died
    meanwhile shows in the group's timeout, by torch's own error.
    """

    def __init__(self, group: dist.ProcessGroup, circle: Circle) -> None:
        """`World.create_collective_group` is the way in."""
        self._group: dist.ProcessGroup | None = group
        self._circle = circle
        self._seat = circle.seat
        self._num_entered = 0  # collective operations; the members count alike
        _circles[group] = circle

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, as DistributedDataParallel takes it."""
        if self._group is None:
            raise RuntimeError(f"{self._seat} was destroyed. Make another one.")
        return self._group

    @property
    def ranks(self) -> list[int]:
        return list(self._seat.ranks)

    def size(self) -> int:
        """How many members there are."""
        return len(self._seat.ranks)

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Sends `tensor` to rank `dst`, which must receive it; returns when the tensor may be changed."""
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receives into `tensor` from rank `src`, or from whoever sends first; returns the sender's rank."""
        source = self.irecv(tensor, src, tag).wait()
        assert source is not None
        return source

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Operation:
        inner = self._other(dst)
        return self._start(f"send() to rank {dst}", lambda group: group.send([tensor], inner, tag), peer=dst)

    def irecv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> Operation:
        """As `recv`, begun; `wait()` returns the sender's rank."""
        if src is None:
            if self._seat.backend == "nccl":
                raise RuntimeError(
                    f"nccl cannot receive from anybody, as recv() in {self._seat} asks for. Name the rank that sends, "
                    "or make the group with backend='gloo'."
                )
            return self._start("recv() from anybody", lambda group: group.recv_anysource([tensor], tag), peer=ANYBODY)
        inner = self._other(src)
        return self._start(f"recv() from rank {src}", lambda group: group.recv([tensor], inner, tag), peer=src)

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool = False) -> Operation | None:
        """Gives everybody the `tensor` of rank `src`, in place."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self._seat.inner(src), 0
        return self._enter("broadcast()", lambda group: group.broadcast([tensor], options), async_op)

    def all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, async_op: bool = False
    ) -> Operation | None:
        """Gives everybody the sum (or `op`) of all tensors, in place."""
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
        """Gives rank `dst` the sum (or `op`) of all tensors, in place; the others' tensors may be used on the way."""
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank, options.rootTensor = dist.ReduceOp(op), self._seat.inner(dst), 0
        return self._enter("reduce()", lambda group: group.reduce([tensor], options), async_op)

    def all_gather(
        self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, async_op: bool = False
    ) -> Operation | None:
        """Fills everybody's `tensor_list`, one tensor for each member in rank order."""
        self._check_list("tensor_list", tensor_list)
        return self._enter("all_gather()", lambda group: group.allgather([tensor_list], [tensor]), async_op)

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: list[torch.Tensor] | None = None,
        dst: int = 0,
        async_op: bool = False,
    ) -> Operation | None:
        """Fills the `gather_list` of rank `dst`, one tensor for each member in rank order."""
        options = dist.GatherOptions()
        options.rootRank = self._seat.inner(dst)
        lists = [self._check_list("gather_list", gather_list)] if dst == self._seat.rank else []
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
        options.rootRank = self._seat.inner(src)
        lists = [self._check_list("scatter_list", scatter_list)] if src == self._seat.rank else []
        return self._enter("scatter()", lambda group: group.scatter([tensor], lists, options), async_op)

    def barrier(self, async_op: bool = False) -> Operation | None:
        """Returns when every member has entered it."""
        options = dist.BarrierOptions()
        if self._seat.backend == "nccl":  # else it guesses the GPU from the rank
            options.device = torch.device("cuda", torch.cuda.current_device())
        return self._enter("barrier()", lambda group: group.barrier(options), async_op)

    def destroy(self) -> None:
        """Leaves the group without waiting for the others; a second time it does nothing."""
        if self._group is not None:
            end_process_group(self._group)
            _circles.pop(self._group, None)
            self._group = None
            with suppress(EchelonError):  # the host keeps a few bytes more if it cannot be told
                self._circle.leave()

    def _other(self, rank: int) -> int:
        if rank == self._seat.rank:
            raise RuntimeError(f"rank {rank} of {self._seat} cannot send to or receive from itself.")
        return self._seat.inner(rank)

    def _check_list(self, what: str, tensors: list[torch.Tensor] | None) -> list[torch.Tensor]:
        if tensors is None or len(tensors) != self.size():
            have = "nothing" if tensors is None else f"{len(tensors)} tensors"
            raise RuntimeError(f"{what} of {self._seat} takes a tensor for each of {self.size()} members, not {have}.")
        return tensors

    def _enter(self, what: str, launch: Launch, async_op: bool) -> Operation | None:
        """Starts an operation of all members; waits for it unless it is to go on by itself."""
        self._num_entered += 1
        operation = self._start(what, launch, number=self._num_entered)
        if async_op:
            return operation
        operation.wait()
        return None

    def _start(self, what: str, launch: Launch, *, number: int = 0, peer: int | None = None) -> Operation:
        group = self.group
        return Operation(self._circle, what, lambda: launch(group), number=number, peer=peer)


def enter_collective_group(
    world: World, ranks: Sequence[int], timeout_s: float, backend: str, hostname: str
) -> CollectiveGroup:
    """The next group of those ranks, which alone call this; the n-th one for which all of them come is the same.

    `hostname` is the address of this host by which the others reach it.
    """
    ordered = tuple(sorted(set(ranks)))
    names = tuple(world.name_of(rank) for rank in ordered)
    if world.rank not in ordered or len(ordered) < len(ranks):
        raise WorldError(
            f"rank {world.rank} is not, or somebody is twice, in the collective group of ranks {list(ranks)}. Only its "
            "members create it, each named once."
        )
    number = world.num_collective[ordered] + 1
    seat = CollectiveMembers(f"{'-'.join(map(str, ordered))}.{number}", ordered, names, world.rank, timeout_s, backend)

    def watch() -> None:
        if lost := circle.lost("create_collective_group()"):
            raise lost

    def count() -> None:
        world.num_collective[ordered] = number

    store = WorldStore(partial(world.control, "store"), timeout_s=timeout_s, watch=watch)
    circle = Circle(seat, store, world.why_lost)
    inner = ordered.index(world.rank)
    begun = time.monotonic()
    try:
        group = make_process_group(
            store,
            seat.name,
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
    except TransportError as error:  # gloo's own: the world knows more about it
        raise circle.verdict("create_collective_group()", error, 0, time.monotonic() - begun) from error
    return CollectiveGroup(group, circle)
