"""A bounded queue of gradients, reduced in batches; independent of processes and messages."""

from __future__ import annotations

import logging
import threading
from collections import deque

import torch
from torch import Tensor

from echelon.errors import ConfigError, Refused

METHODS = ("sum", "mean")
logger = logging.getLogger("echelon.servers")


class GradReducer:
    """A queue of gradients, flat vectors of equal length; `reduce` reduces the oldest `reduce_batch_size` to one.

    The queue holds at most `max_queue_size`: when it is full, the oldest gradient is dropped and counted, and a message
    is logged at the first, tenth, hundredth drop and so on. No call blocks, and any thread may use it. Invariant:
    pushed = reduced + queued + dropped.
    """

    def __init__(
        self,
        reduce_batch_size: int = 4,
        max_queue_size: int = 64,
        reduce_method: str = "sum",
        reduce_device: str | torch.device = "cpu",
        name: str = "gradient reducer",
    ) -> None:
        if reduce_method not in METHODS:
            raise ConfigError(f"{name}: reduce_method={reduce_method!r} is none of {', '.join(METHODS)}.")
        if not 1 <= reduce_batch_size <= max_queue_size:
            raise ConfigError(
                f"{name}: reduce_batch_size={reduce_batch_size} must be at least 1 and at most "
                f"max_queue_size={max_queue_size}, or no batch is ever full."
            )
        self.name, self.reduce_batch_size, self.max_queue_size = name, reduce_batch_size, max_queue_size
        self.reduce_method, self.reduce_device = reduce_method, reduce_device
        self.pushed = self.reduced = self.dropped = 0
        self._size: int | None = None  # elements of a gradient; set by the first one
        self._queue: deque[Tensor] = deque()
        self._lock = threading.Lock()

    def push(self, gradient: Tensor) -> bool:
        """Adds a gradient, which the caller must not change any more; returns False if the oldest was dropped."""
        with self._lock:
            self._size = gradient.numel() if self._size is None else self._size
            if gradient.dim() != 1 or gradient.numel() != self._size:
                shape = tuple(gradient.shape)
                raise Refused(
                    f"{self.name}: a gradient of shape {shape} was refused: the shape must be ({self._size},)."
                )
            self._queue.append(gradient)
            self.pushed += 1
            is_full = len(self._queue) > self.max_queue_size
            if is_full:
                self._queue.popleft()
                self.dropped += 1
                self._report_dropped()
            return not is_full

    def _report_dropped(self) -> None:
        if str(self.dropped).strip("0") == "1":
            logger.warning(
                "%s: %d of %d gradients were dropped, as its queue of %d was full. Gradients arrive faster than they "
                "are reduced: raise reduce_batch_size, or push less often.",
                *(self.name, self.dropped, self.pushed, self.max_queue_size),
            )

    def reduce(self) -> Tensor | None:
        """Reduces the oldest batch of gradients to one; returns None if the queue has less than a batch."""
        with self._lock:
            if len(self._queue) < self.reduce_batch_size:
                return None
            batch = [self._queue.popleft() for _ in range(self.reduce_batch_size)]
            self.reduced += len(batch)
        total = batch[0].to(self.reduce_device, copy=True)  # torch.stack and sum would take eight times as long
        for gradient in batch[1:]:
            total += gradient.to(self.reduce_device)
        return total if self.reduce_method == "sum" else total.div_(len(batch))

    def stats(self) -> dict[str, int]:
        """Returns a consistent snapshot of the counts."""
        with self._lock:
            queued = len(self._queue)
            return {"pushed": self.pushed, "reduced": self.reduced, "queued": queued, "dropped": self.dropped}
