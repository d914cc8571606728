"""Counts the memory of tensors on a CPU, for which torch has no counter as it has for GPUs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that operations create within the context, as long as they exist.

    Memory within one operation is not counted, and neither are tensors from before the context.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.peak = 0, 0
        self._known = weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._find((args, kwargs))  # exist already; the result may be a view of them
        result = function(*args, **(kwargs or {}))
        for storage in self._find(result):
            self.now += storage.nbytes()
            weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _find(self, tree: Any) -> list[torch.UntypedStorage]:
        """Returns the storages in `tree` that no earlier call has returned."""
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        found = [storage for tensor in tensors if (storage := tensor.untyped_storage()) not in self._known]
        self._known.update(found)
        return found

    def _free(self, nbytes: int) -> None:
        self.now -= nbytes
