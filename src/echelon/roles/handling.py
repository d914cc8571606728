"""Measures how long the gateway takes from the receipt of a worker's message to the reply."""

from __future__ import annotations

import collections

import numpy as np

WINDOW = 4_096  # newest messages with steps that the percentiles cover


class Handling:
    """Handling times of messages. The figures cover only messages that contain steps of an episode."""

    def __init__(self) -> None:
        self.seconds = 0.0  # total over all messages
        self._count, self._total = 0, 0.0
        self._recent: collections.deque[float] = collections.deque(maxlen=WINDOW)

    def note(self, seconds: float, *, is_episode: bool) -> None:
        self.seconds += seconds
        if is_episode:
            self._count += 1
            self._total += seconds
            self._recent.append(seconds)

    def figures(self) -> dict[str, float]:
        """Returns the mean, percentiles and maximum in milliseconds; empty before the first message."""
        if not self._count:
            return {}
        p50, p95 = np.percentile(self._recent, (50, 95))
        return {
            "handling_mean_ms": 1e3 * self._total / self._count,
            "handling_p50_ms": 1e3 * float(p50),
            "handling_p95_ms": 1e3 * float(p95),
            "handling_max_ms": 1e3 * max(self._recent),
        }
