"""Gradients that are waiting, and their reduction a batch at a time; knows no process."""

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
    """A queue of gradients, flat vectors of one length, of which the oldest `reduce_batch_size` are reduced to one.

    It is bounded: where `max_queue_size` wait already, the oldest makes way, and is counted; a message is logged at the
    first, the tenth, the hundredth and so on. Nobody blocks or sleeps here, and any threads may use it. Always:
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
                f"{name}: reduce_batch_size={reduce_batch_size} must be 1 or more and max_queue_size={max_queue_size} "
                "no less, or no batch is ever full."
            )
        self.name, self.reduce_batch_size, self.max_queue_size = name, reduce_batch_size, max_queue_size
        self.reduce_method, self.reduce_device = reduce_method, reduce_device
        self.pushed = self.reduced = self.dropped = 0
        self._size: int | None = None  # the numbers of a gradient, from the first one on
        self._queue: deque[Tensor] = deque()
        self._lock = threading.Lock()

    def push(self, gradient: Tensor) -> bool:
        """Adds a gradient, which the caller does not change any more; False if the oldest one was dropped for it."""
        with self._lock:
            self._size = gradient.numel() if self._size is None else self._size
            if gradient.dim() != 1 or gradient.numel() != self._size:
                shape = tuple(gradient.shape)
                raise Refused(f"{self.name}: a gradient of the shape {shape} came where ({self._size},) is reduced.")
            self._queue.append(gradient)
            self.pushed += 1
            is_full = len(self._queue) > self.max_queue_size
            if is_full:
                self._queue.popleft()
                self.dropped += 1
                self._tell_dropped()
            return not is_full

    def _tell_dropped(self) -> None:
        if str(self.dropped).strip("0") == "1":
            logger.warning(
                "%s: %d of %d gradients were dropped, as its queue of %d was full. They come faster than they are "
                "reduced: raise reduce_batch_size, or push less often.",
                *(self.name, self.dropped, self.pushed, self.max_queue_size),
            )

    def reduce(self) -> Tensor | None:
        """The oldest gradients of a batch as one; None while there are fewer."""
        with self._lock:
            if len(self._queue) < self.reduce_batch_size:
                return None
            batch = [self._queue.popleft() for _ in range(self.reduce_batch_size)]
            self.reduced += len(batch)
        total = batch[0].to(self.reduce_device, copy=True)  # a stack of them would cost eight times as much
        for gradient in batch[1:]:
            total += gradient.to(self.reduce_device)
        return total if self.reduce_method == "sum" else total.div_(len(batch))

    def stats(self) -> dict[str, int]:
        """The counts, all of one moment."""
        with self._lock:
            queued = len(self._queue)
            return {"pushed": self.pushed, "reduced": self.reduced, "queued": queued, "dropped": self.dropped}
