"""Experience as an actor sees it: where the steps of its teams go, and when they may go on.

`SlotExperience` writes trajectories straight into the slots of the ring, which the learner takes in order. The other
kind is `ReplayExperience`: transitions into the actor's replay shard.

Shapes: T steps of a trajectory, K environments of an actor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from echelon.envs.vector import EnvGroup, StepRows
from echelon.roles.acting import ActReply, ActRequest
from echelon.roles.context import Station
from echelon.schema import TrajectorySchema
from echelon.transport.shared_memory import SlotRing

Array = np.ndarray[Any, Any]
UNSTAMPED = np.iinfo(np.int64).max  # the version of a step that nobody has chosen an action for yet


@dataclass(slots=True)
class Row:
    """One step of a slot, every view made beforehand: the hot path slices nothing."""

    question: ActRequest
    action: Array
    log_prob: Array
    version: Array  # (1,), which the teams share
    step: StepRows
    next_first: Array


class SlotRows:
    """A team's columns of one slot, as rows."""

    def __init__(self, schema: TrajectorySchema, views: dict[str, Array], columns: slice) -> None:
        names, space = schema.observation_names, schema.spaces.observation
        T = schema.num_steps
        self.observations = [[views[name][t, columns] for name in names] for t in range(T + 1)]
        self.firsts = [views["first"][t, columns] for t in range(T + 1)]
        self.state = [views[f"state.{i}"][columns] for i in range(len(schema.state_shapes))]
        self.rows = [
            Row(
                question=ActRequest.of(space, self.observations[t], self.firsts[t]),
                action=views["action"][t, columns],
                log_prob=views["log_prob"][t, columns],
                version=views["version"][t : t + 1],
                step=StepRows(
                    observation=self.observations[t + 1],
                    reward=views["reward"][t, columns],
                    terminated=views["terminated"][t, columns],
                    truncated=views["truncated"][t, columns],
                    valid=views["valid"][t, columns],
                ),
                next_first=self.firsts[t + 1],
            )
            for t in range(T)
        ]


class Team:
    """One group of environments; it goes from slot to slot by itself, and a slot is whole when all teams have left it.

    `trajectory` numbers the one that it is in, or enters next, as the ring counts them.
    """

    def __init__(self, index: int, group: EnvGroup, columns: slice, pages: list[SlotRows], trajectory: int) -> None:
        self.index, self.group, self.columns = index, group, columns
        self.trajectory, self.t = trajectory, 0
        self.page: SlotRows | None = None
        self._pages = pages
        # The first row of the next trajectory: the last of the one before.
        self.observation = [np.zeros_like(leaf) for leaf in pages[0].observations[0]]
        self.first = np.ones(group.num_envs, np.bool_)

    def enter(self) -> SlotRows:
        """Begins the next trajectory in its slot."""
        page = self.page = self._pages[self.trajectory % len(self._pages)]
        self.t = 0
        for target, source in zip(page.observations[0], self.observation, strict=True):
            target[...] = source
        page.firsts[0][...] = self.first
        return page

    def leave(self) -> None:
        """Keeps the last row of a trajectory that is over."""
        assert self.page is not None
        for target, source in zip(self.observation, self.page.observations[-1], strict=True):
            target[...] = source
        self.first[...] = self.page.firsts[-1]
        self.page = None
        self.trajectory += 1


class EpisodeLedger:
    """Return and length of the episode under way in every environment, written down where one ends."""

    def __init__(self, num_envs: int) -> None:
        self.returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, np.int64)

    def record(self, views: dict[str, Array]) -> None:
        """Fills `episode_return` and `episode_length` of a finished trajectory."""
        views["episode_return"].fill(0.0)
        views["episode_length"].fill(0)
        with np.errstate(over="ignore", invalid="ignore"):  # infinite rewards: the learner will tell whose they are
            self._record(views)

    def _record(self, views: dict[str, Array]) -> None:
        episode_return, episode_length = views["episode_return"], views["episode_length"]
        returns = self.returns + np.cumsum(views["reward"], 0, dtype=np.float64)
        lengths = self.lengths + np.cumsum(views["valid"], 0)
        past_return, past_length = np.zeros_like(self.returns), np.zeros_like(self.lengths)
        ended = views["terminated"] | views["truncated"]
        for t, k in np.argwhere(ended | ~views["valid"]).tolist():  # a restarted environment begins anew without an end
            if ended[t, k]:
                episode_return[t, k] = returns[t, k] - past_return[k]
                episode_length[t, k] = lengths[t, k] - past_length[k]
            past_return[k], past_length[k] = returns[t, k], lengths[t, k]
        self.returns, self.lengths = returns[-1] - past_return, lengths[-1] - past_length


class Experience(Protocol):
    """What becomes of an actor's steps."""

    @property
    def head(self) -> int:
        """The number of the trajectory that comes next."""

    def pages(self, index: int, columns: slice) -> list[SlotRows]:
        """Where the team of that index, of these columns, writes its trajectories, one page after the other."""

    def admits(self, trajectory: int) -> bool:
        """Whether a team may enter the trajectory of that number."""

    def open(self, trajectory: int) -> None:
        """The first team enters a trajectory."""

    def stepped(self, team: Team, row: Row, answer: ActReply) -> None:
        """A team made the step of `row`, chosen by `answer`, whose action and log-probability lie in the row by now."""

    def left(self, team: Team, teams: Sequence[Team]) -> None:
        """`team`, one of `teams`, has gone through its trajectory."""

    def wait(self, teams: Sequence[Team], timeout_s: float) -> None:
        """Sleeps until one of `teams` may go on, at most `timeout_s`."""

    def close(self) -> None: ...


class SlotExperience:
    """Trajectories in the actor's slots; the learner admits each, and rings `free` when it does."""

    def __init__(self, ring: SlotRing, schema: TrajectorySchema, stream: int, station: Station) -> None:
        self.ring, self.schema, self.stream, self.station = ring, schema, stream, station
        self.ledger = EpisodeLedger(schema.num_envs)

    @property
    def head(self) -> int:
        return int(self.ring.head[self.stream])

    def pages(self, index: int, columns: slice) -> list[SlotRows]:
        del index
        return [SlotRows(self.schema, views, columns) for views in self.ring.slots[self.stream]]

    def admits(self, trajectory: int) -> bool:
        return bool(trajectory < self.ring.granted[self.stream])

    def open(self, trajectory: int) -> None:
        self.ring.slots[self.stream][trajectory % self.ring.num_slots]["version"].fill(UNSTAMPED)

    def stepped(self, team: Team, row: Row, answer: ActReply) -> None:
        """The page is the slot: everything lies where the learner reads it."""

    def left(self, team: Team, teams: Sequence[Team]) -> None:
        """The last team to leave a trajectory hands it over."""
        if min(other.trajectory for other in teams) > self.head:
            self.ledger.record(self.ring.writable(self.stream))
            self.ring.commit(self.stream)

    def wait(self, teams: Sequence[Team], timeout_s: float) -> None:
        doorbell = self.ring.free[self.stream]
        doorbell.clear()
        if not any(self.admits(team.trajectory) for team in teams):
            self.station.wait(timeout_s, [doorbell.descriptor])

    def close(self) -> None:
        self.ring.close()
