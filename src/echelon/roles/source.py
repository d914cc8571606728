"""Sources: where the learner takes batches from, and what is counted of them.

`QueueSource` takes slots, once and in order; `ReplaySource` draws transitions, again and again.
"""

from __future__ import annotations

import collections
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from echelon.roles.context import Station
from echelon.roles.stopping import RETURN_WINDOW
from echelon.roles.update import Acknowledge


@dataclass(slots=True)
class Counters:
    """What was consumed so far: the run's own account of itself."""

    env_steps: int = 0
    episodes: int = 0
    updates: int = 0
    dropped: int = 0  # trajectories that came too late
    lag_sum: float = 0.0
    lag_steps: int = 0  # that the sum is over
    lag_max: int = 0
    return_max: float | None = None
    returns: collections.deque[float] = field(default_factory=lambda: collections.deque(maxlen=RETURN_WINDOW))
    lengths: collections.deque[int] = field(default_factory=lambda: collections.deque(maxlen=RETURN_WINDOW))

    @property
    def return_mean(self) -> float | None:
        return float(np.mean(self.returns)) if self.returns else None

    @property
    def lag_mean(self) -> float:
        return self.lag_sum / self.lag_steps if self.lag_steps else 0.0

    def note_episode(self, value: float, length: int) -> None:
        """An episode ended with this return; how many did is counted by the caller."""
        self.returns.append(value)
        self.lengths.append(length)
        self.return_max = value if self.return_max is None else max(self.return_max, value)

    def note_episodes(self, values: list[float], lengths: list[int]) -> None:
        """Episodes ended with these returns and lengths: many at once, as short ones of many environments do."""
        self.returns.extend(values)
        self.lengths.extend(lengths)
        best = [] if self.return_max is None else [self.return_max]
        self.return_max = max(best + values, default=None)

    def state_dict(self) -> dict[str, Any]:
        names = ("env_steps", "episodes", "updates", "dropped", "lag_sum", "lag_steps", "lag_max", "return_max")
        state: dict[str, Any] = {name: getattr(self, name) for name in names}
        return {**state, "returns": list(self.returns), "lengths": list(self.lengths)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if name in ("returns", "lengths"):
                value = collections.deque(value, maxlen=RETURN_WINDOW)
            setattr(self, name, value)


class Offer(NamedTuple):
    """What one of several learners can give to the next batch."""

    is_ready: bool
    total: float = 0.0  # the mass of its shards (`replay.sampled.Mass`), where experience is replayed
    size: int = 0
    share: float = 0.0  # a number drawn at random; that of the first learner counts


class Content(Protocol):
    """What a source keeps from batch to batch, and across restarts of the learner."""

    def figures(self) -> dict[str, Any]:
        """How it stands, for the record."""

    def news(self) -> list[str]:
        """What the user should be told since the last time."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def save(self, name: str) -> None:
        """Begins to write all of it, if that is asked for, for the checkpoint of that name."""

    def finish(self, tick: Callable[[], None]) -> None:
        """Waits until what `save` began is written; calls `tick` meanwhile."""


class Source(ABC):
    """Where the learner takes batches from."""

    publish_every = 1  # batches from one version of the weights to the next
    rate_window_s = 1.0  # that the recent rate of steps covers
    counts_episodes = False  # whether a run may be stopped by its number of episodes
    progress = 0.0  # the part (0 to 1) of the run that is done, as the learner says after every batch it takes
    content: Content | None = None  # none where everything is learned from once
    acknowledge: Acknowledge | None = None  # told what there was to learn from the items of a batch

    def __init__(self) -> None:
        self.counters = Counters()
        self.fresh_lag: list[tuple[float, int]] = []  # lag mean and max of batches since the last report

    @abstractmethod
    def take(self, version: int) -> Any | None:
        """The next batch for a learner at `version`, or None when it is not there yet."""

    @abstractmethod
    def prefetch(self, version: int) -> None:
        """Fetches the batch for a learner at `version`, its next, while a GPU still learns from this one."""

    @abstractmethod
    def listen(self) -> None:
        """From here on, what arrives ends a `wait`; look once more before waiting."""

    @abstractmethod
    def wait(self, station: Station, timeout_s: float) -> None:
        """Sleeps until there may be a batch, at most `timeout_s`."""

    @abstractmethod
    def admit(self) -> None:
        """New weights are published: lets the actors go on."""

    @abstractmethod
    def close(self) -> None: ...


class SharedSource(Source):
    """Where one of several learners takes its part of every batch from."""

    counts_offers = True  # whether `offer` counts what it offers, before it is taken

    @abstractmethod
    def offer(self, version: int) -> Offer:
        """What it has for the next batch; the learner is at `version`."""

    @abstractmethod
    def take_part(self, version: int, offers: Sequence[Offer]) -> Any | None:
        """Its part of the next batch, or None if by everybody's `offers`, in order, there is none yet."""
