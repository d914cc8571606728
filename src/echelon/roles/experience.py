"""The experience interface of an actor: where the steps of its teams are stored, and when a team may continue.

`SlotExperience` writes trajectories directly into the slots of the ring, from which the learner reads them in order.
`ReplayExperience` writes transitions into the actor's replay shard, at the head; an actor on another host writes
trajectories into slots also there, from which the carrier fills its shard. `GradientExperience` computes gradients from
rollouts and writes those into slots.

Shapes: T steps of a trajectory, K environments of an actor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from echelon.envs.vector import EnvGroup, StepRows
from echelon.roles.acting import ActReply, ActRequest, Values
from echelon.roles.context import Station
from echelon.schema import TrajectorySchema
from echelon.transport.shared_memory import SlotRing

Array = np.ndarray[Any, Any]
EPISODE_FIELDS = ("reward", "valid", "terminated", "truncated", "episode_return", "episode_length")
UNSTAMPED = np.iinfo(np.int64).max  # the version of a step whose actions have not been chosen yet


@dataclass(slots=True)
class Row:
    """One step of a slot. All views are created in advance, so that the hot path slices nothing."""

    request: ActRequest
    action: Array
    log_prob: Array
    version: Array  # (1,), shared by all teams
    step: StepRows
    next_first: Array
    values: Array | None = None  # (2, K): of the chosen and of the best action
    valued: Array | None = None  # (1,): whether `values` is set

    def keep_values(self, values: Values | None) -> None:
        """Stores the action values of a reply, if trajectories carry them."""
        if self.values is not None and self.valued is not None:
            self.valued[0] = values is not None
            if values is not None:
                self.values[0], self.values[1] = values

    @property
    def reply(self) -> ActReply:
        """The reply that the step was made with."""
        values = None
        if self.values is not None and self.valued is not None and self.valued[0]:
            values = Values(*self.values)
        return ActReply(self.action, self.log_prob, int(self.version[0]), values)


class SlotRows:
    """The columns of one team in one slot, row by row."""

    def __init__(self, schema: TrajectorySchema, views: dict[str, Array], columns: slice) -> None:
        names, space = schema.observation_names, schema.spaces.observation
        T = schema.num_steps
        self.episodes = {name: views[name][:, columns] for name in EPISODE_FIELDS}
        self.observations = [[views[name][t, columns] for name in names] for t in range(T + 1)]
        self.firsts = [views["first"][t, columns] for t in range(T + 1)]
        self.state = [views[f"state.{i}"][columns] for i in range(len(schema.state_shapes))]
        self.rows = [
            Row(
                request=ActRequest.of(space, self.observations[t], self.firsts[t]),
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
                values=views["values"][t, :, columns] if schema.with_values else None,
                valued=views["valued"][t : t + 1] if schema.with_values else None,
            )
            for t in range(T)
        ]


class Team:
    """One group of environments. Teams move from slot to slot independently.

    A slot is complete when all teams have left it. `trajectory` is the number of the trajectory that the team is in or
    will enter next, counted as in the ring.
    """

    def __init__(self, index: int, group: EnvGroup, columns: slice, pages: list[SlotRows], trajectory: int) -> None:
        self.index, self.group, self.columns = index, group, columns
        self.trajectory, self.t = trajectory, 0
        self.page: SlotRows | None = None
        self._pages = pages
        # The first row of the next trajectory is the last row of the previous one.
        self.observation = [np.zeros_like(leaf) for leaf in pages[0].observations[0]]
        self.first = np.ones(group.num_envs, np.bool_)
        self.ledger = EpisodeLedger(group.num_envs)

    def reset(self) -> None:
        """Starts a new episode in every environment; called between two trajectories."""
        self.group.reset(self.observation)
        self.first[:] = True
        self.ledger = EpisodeLedger(self.group.num_envs)

    def enter(self) -> SlotRows:
        """Begins the next trajectory and returns its page."""
        page = self.page = self._pages[self.trajectory % len(self._pages)]
        self.t = 0
        for target, source in zip(page.observations[0], self.observation, strict=True):
            target[...] = source
        page.firsts[0][...] = self.first
        return page

    def leave(self) -> None:
        """Ends the trajectory, fills in its episodes that ended and keeps a copy of its last row."""
        assert self.page is not None
        self.ledger.record(self.page.episodes)
        for target, source in zip(self.observation, self.page.observations[-1], strict=True):
            target[...] = source
        self.first[...] = self.page.firsts[-1]
        self.page = None
        self.trajectory += 1


class EpisodeLedger:
    """Tracks the return and length of the current episode of every environment."""

    def __init__(self, num_envs: int) -> None:
        self.returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, np.int64)

    def record(self, views: dict[str, Array]) -> None:
        """Fills `episode_return` and `episode_length` of a complete trajectory, at the steps where episodes end."""
        views["episode_return"].fill(0.0)
        views["episode_length"].fill(0)
        with np.errstate(over="ignore", invalid="ignore"):  # the learner reports infinite rewards and their source
            self._record(views)

    def _record(self, views: dict[str, Array]) -> None:
        episode_return, episode_length = views["episode_return"], views["episode_length"]
        returns = self.returns + np.cumsum(views["reward"], 0, dtype=np.float64)
        lengths = self.lengths + np.cumsum(views["valid"], 0)
        past_return, past_length = np.zeros_like(self.returns), np.zeros_like(self.lengths)
        ended = views["terminated"] | views["truncated"]
        for t, k in np.argwhere(ended | ~views["valid"]).tolist():  # an environment may restart without an end
            if ended[t, k]:
                episode_return[t, k] = returns[t, k] - past_return[k]
                episode_length[t, k] = lengths[t, k] - past_length[k]
            past_return[k], past_length[k] = returns[t, k], lengths[t, k]
        self.returns, self.lengths = returns[-1] - past_return, lengths[-1] - past_length

    def after(self, views: dict[str, Array], num_steps: int) -> EpisodeLedger:
        """Returns a copy that includes the first `num_steps` steps of an incomplete trajectory."""
        ledger = EpisodeLedger(len(self.returns))
        ledger.returns, ledger.lengths = self.returns, self.lengths
        if num_steps:
            ledger.record({name: view[:num_steps].copy() for name, view in views.items()})
        return ledger


class Experience(Protocol):
    """Receives the steps of an actor."""

    @property
    def head(self) -> int:
        """The number of the next trajectory."""

    def pages(self, index: int, columns: slice) -> list[SlotRows]:
        """Returns the pages into which team `index`, which has these columns, writes its trajectories in turn."""

    def admits(self, trajectory: int) -> bool:
        """Returns whether a team may enter trajectory number `trajectory`."""

    def open(self, trajectory: int) -> None:
        """Called when the first team enters a trajectory."""

    def stepped(self, team: Team, row: Row, reply: ActReply) -> None:
        """Called after each step of a team. `row` already holds the action and log-probability of `reply`."""

    def left(self, team: Team, teams: Sequence[Team]) -> None:
        """Called when `team`, one of `teams`, has completed its trajectory."""

    def wait(self, teams: Sequence[Team], timeout_s: float) -> None:
        """Sleeps until one of `teams` may continue, for at most `timeout_s`."""

    def close(self) -> None: ...


class SlotExperience:
    """Writes trajectories into the actor's slots. The learner admits each one and rings `free` when it does."""

    def __init__(self, ring: SlotRing, schema: TrajectorySchema, stream: int, station: Station) -> None:
        self.ring, self.schema, self.stream, self.station = ring, schema, stream, station

    @property
    def head(self) -> int:
        return int(self.ring.head[self.stream])

    def pages(self, index: int, columns: slice) -> list[SlotRows]:
        del index
        return [SlotRows(self.schema, views, columns) for views in self.ring.slots(self.stream)]

    def admits(self, trajectory: int) -> bool:
        return bool(trajectory < self.ring.granted[self.stream])

    def open(self, trajectory: int) -> None:
        self.ring.slots(self.stream)[trajectory % self.ring.num_slots]["version"].fill(UNSTAMPED)

    def stepped(self, team: Team, row: Row, reply: ActReply) -> None:
        """Adds the action values; the page is the slot itself, which holds everything else."""
        row.keep_values(reply.values)

    def left(self, team: Team, teams: Sequence[Team]) -> None:
        """Commits the trajectory when the last team leaves it."""
        if min(other.trajectory for other in teams) > self.head:
            self.ring.commit(self.stream)

    def wait(self, teams: Sequence[Team], timeout_s: float) -> None:
        doorbell = self.ring.free[self.stream]
        doorbell.clear()
        if not any(self.admits(team.trajectory) for team in teams):
            self.station.wait(timeout_s, [doorbell.descriptor])

    def close(self) -> None:
        self.ring.close()
