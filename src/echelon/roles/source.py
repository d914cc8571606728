"""The interface of sources, from which the learner takes batches, and the counters of consumed experience.

`QueueSource` yields every slot once and in order; `ReplaySource` draws transitions repeatedly.
"""

from __future__ import annotations

import collections
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from echelon.roles.context import Station
from echelon.roles.stopping import RETURN_WINDOW
from echelon.roles.update import Acknowledge
from echelon.runs.progress import SavedCounters

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Counters:
    """Totals of the experience that the run has consumed so far."""

    env_steps: int = 0
    episodes: int = 0
    updates: int = 0
    dropped: int = 0  # trajectories that arrived too late
    lag_sum: float = 0.0
    lag_steps: int = 0  # number of steps in lag_sum
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
        """Notes the return and length of an episode. The caller counts the episodes."""
        self.returns.append(value)
        self.lengths.append(length)
        self.return_max = value if self.return_max is None else max(self.return_max, value)

    def note_episodes(self, values: list[float], lengths: list[int]) -> None:
        """Notes the returns and lengths of several episodes in one call, which is faster for many short episodes."""
        self.returns.extend(values)
        self.lengths.extend(lengths)
        best = [] if self.return_max is None else [self.return_max]
        self.return_max = max(best + values, default=None)

    def state_dict(self) -> dict[str, Any]:
        names = ("env_steps", "episodes", "updates", "dropped", "lag_sum", "lag_steps", "lag_max", "return_max")
        state: dict[str, Any] = {name: getattr(self, name) for name in names}
        return {**state, "returns": list(self.returns), "lengths": list(self.lengths)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in msgspec.structs.asdict(msgspec.convert(state, SavedCounters)).items():
            setattr(self, name, collections.deque(value, maxlen=RETURN_WINDOW) if isinstance(value, list) else value)


class EndedEpisodes(NamedTuple):
    """Episodes that ended together, as arrays; an actor or environment that is not known is -1."""

    returns: Array
    lengths: Array
    actors: Array
    envs: Array  # index of the environment among those of its actor

    @property
    def columns(self) -> dict[str, Array]:
        """The columns of `episodes.csv` that it has."""
        integers = {"length": self.lengths, "actor": self.actors, "env": self.envs}
        return {"return": self.returns, **{name: values.astype(np.int64) for name, values in integers.items()}}

    def full(self, value: float) -> Array:
        """Returns a column with one value."""
        return np.full(len(self.returns), value)


class Offer(NamedTuple):
    """What one of several learners can contribute to the next batch."""

    is_ready: bool
    total: float = 0.0  # the mass of its shards (`replay.sampled.Mass`), with replay
    size: int = 0
    share: float = 0.0  # a random number; only that of the first learner is used


class Content(Protocol):
    """State that a source keeps between batches and across restarts of the learner."""

    def refresh(self) -> None:
        """Reads the items that actors have added since the last call, and then the steps that they have counted.

        Actors count a step before they add its item. So the counters include the steps of all items that were read.
        """

    def figures(self) -> dict[str, Any]:
        """Returns figures for the metrics, as of the last `refresh`."""

    def news(self) -> list[str]:
        """Returns the messages for the user since the last call."""

    def disk_error(self) -> str | None:
        """Returns why the last `save` failed, "" if it did not, or None if it is not over."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to save in a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def save(self, name: str) -> None:
        """Starts to write the content as of the last `refresh` for the checkpoint `name`, if that is configured."""

    def finish(self, tick: Callable[[], None]) -> None:
        """Waits until the content that `save` started to write is written; calls `tick` in the meantime."""


class Source(ABC):
    """Yields batches to the learner."""

    publish_every = 1  # batches from one version of the weights to the next
    rate_window_s = 1.0  # time covered by the recent rate of steps
    counts_episodes = False  # whether updates belong to episodes of workers
    progress = 0.0  # completed fraction (0 to 1) of the run; the learner sets it after every batch it takes
    content: Content | None = None  # None if every item is learned from once
    acknowledge: Acknowledge | None = None  # receives the new priorities of the items of a batch

    def __init__(self) -> None:
        self.counters = Counters()
        self.fresh_lag: list[tuple[float, int]] = []  # lag mean and max of batches since the last report
        self.ended: list[EndedEpisodes] = []  # the counted episodes; the learner takes them out

    @abstractmethod
    def take(self, version: int) -> Any | None:
        """Returns the next batch for a learner at `version`, or None if it is not ready."""

    @abstractmethod
    def prefetch(self, version: int) -> None:
        """Fetches the next batch, for a learner at `version`, while a GPU still learns from the current one."""

    @abstractmethod
    def listen(self) -> None:
        """Arms `wait`: anything that arrives after this call ends it. Check once more before waiting."""

    @abstractmethod
    def wait(self, station: Station, timeout_s: float) -> None:
        """Sleeps until a batch may be ready, for at most `timeout_s`."""

    @abstractmethod
    def admit(self) -> None:
        """Lets the actors continue. Called after new weights are published."""

    def has_due_batch(self) -> bool:
        """Whether the run must not end yet, although its steps are made."""
        return False

    def repeat_from(self, updates: int) -> None:
        """Prepares a source, whose content is kept, for a learner that was restored with this number of updates."""
        del updates

    @abstractmethod
    def close(self) -> None: ...


class SharedSource(Source):
    """Yields one learner's part of every batch, with several learners."""

    counts_offers = True  # whether `offer` counts a part when it is offered, before it is taken

    @abstractmethod
    def offer(self, version: int) -> Offer:
        """Returns its offer for the next batch, for a learner at `version`."""

    @abstractmethod
    def take_part(self, version: int, offers: Sequence[Offer]) -> Any | None:
        """Returns its part of the next batch, or None if the `offers` of all learners, by rank, do not make one."""
