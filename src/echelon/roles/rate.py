"""How fast a run goes, as the learner sees it."""

from __future__ import annotations

import collections

WINDOW_S = 1.0  # that the recent rate covers ...
EPISODES_WINDOW_S = 30.0  # ... where steps come as whole episodes, in lumps
WARM_UP_S = 2.0  # after the first batch; not part of the steady rate


class Rate:
    """Environment steps per second: lately, and in the steady state."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self.first: tuple[float, int] | None = None
        self.steady: tuple[float, int] | None = None
        self.recent_batches: collections.deque[tuple[float, int]] = collections.deque()

    def note(self, now: float, env_steps: int) -> None:
        """A batch was taken that brought the count to `env_steps`."""
        self.first = self.first or (now, env_steps)
        if self.steady is None and now - self.first[0] >= WARM_UP_S:
            self.steady = (now, env_steps)
        batches = self.recent_batches
        batches.append((now, env_steps))
        while len(batches) > 2 and now - batches[1][0] >= self.window_s:
            batches.popleft()

    def recent(self) -> float:
        """From batch to batch, so that a report between two does not read as standstill."""
        if len(self.recent_batches) < 2:
            return 0.0
        (then, before), (now, after) = self.recent_batches[0], self.recent_batches[-1]
        return (after - before) / max(now - then, 1e-9)

    def steady_state(self, now: float, env_steps: int) -> float:
        """From the end of the warm-up on; of a run too short for one, from its first batch."""
        start = self.steady if self.steady and now - self.steady[0] >= WARM_UP_S else self.first
        return (env_steps - start[1]) / max(now - start[0], 1e-9) if start else 0.0
