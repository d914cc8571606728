"""Memory for batches on the CPU and on the learner's device, and the copies between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from echelon.layout import place, size_of
from echelon.replay.layout import ItemBlock, ShardLayout
from echelon.replay.sampled import Keys, Sampled

Array = np.ndarray[Any, Any]
FieldPlan = list[tuple[str, tuple[int, ...], np.dtype[Any]]]  # name, shape, dtype


class BatchMemory:
    """One contiguous block of memory for a batch, and its fields as tensors."""

    def __init__(self, plan: FieldPlan, device: torch.device, *, pinned: bool = False) -> None:
        """`pinned` locks its pages, so that a GPU can copy from it asynchronously."""
        fields = place(plan)
        self.memory = torch.zeros(size_of(fields), dtype=torch.uint8, device=device, pin_memory=pinned)
        self.tensors: dict[str, torch.Tensor] = {}
        for f in fields:
            kind = torch.from_numpy(np.zeros(0, f.dtype)).dtype
            self.tensors[f.name] = self.memory[f.offset : f.offset + f.nbytes].view(kind).view(f.shape)


def transition_fields(layout: ShardLayout, size: int) -> FieldPlan:
    """Returns the fields of a batch of `size` transitions."""
    return [*((f.name, (size, *f.shape), f.dtype) for f in layout.fields), ("weight", (size,), np.dtype(np.float32))]


class TransitionStaging(BatchMemory):
    """CPU memory into which the items of one batch are drawn, pinned if the learner uses a GPU."""

    def __init__(self, layout: ShardLayout, size: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        super().__init__(transition_fields(layout, size), torch.device("cpu"), pinned=is_cuda)
        self.arrays: dict[str, Array] = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        # Frames are gathered directly into the batch; rows are drawn whole and then split into their fields.
        stacks = {f.name: self.arrays[f.name] for f in layout.fields if f.stack}
        self.block = ItemBlock(np.zeros(size, layout.row), stacks)
        self.rows = [f.name for f in layout.fields if not f.stack]
        self.keys: Keys
        self.copied: torch.cuda.Event | None = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Waits until the device has read the previous batch from this memory."""
        if self.copied is not None:
            self.copied.synchronize()

    def put(self, sampled: Sampled) -> None:
        """Copies the fields of the items that were drawn into `block`, or into its first rows."""
        self.keys, count = sampled.keys, len(sampled.keys)
        if count:
            for name in self.rows:
                self.arrays[name][:count] = sampled.fields[name]
            self.arrays["weight"][:count] = sampled.weights

    def move(self, landing: BatchMemory | None) -> dict[str, torch.Tensor]:
        """Returns the fields on the device: those of `landing`, filled by an asynchronous copy.

        The device runs the copy after all work queued before it, so the previous batch in `landing` has been learned
        from by then. Without `landing`, returns the fields in this memory.
        """
        tensors = self.tensors
        if landing is not None and self.copied is not None:
            landing.memory.copy_(self.memory, non_blocking=True)
            self.copied.record()
            tensors = landing.tensors
        count = len(self.keys)
        is_whole = count == len(self.block.rows)
        return tensors if is_whole else {name: tensor[:count] for name, tensor in tensors.items()}
