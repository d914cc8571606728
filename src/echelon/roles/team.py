"""A team: one group of an actor's environments, its columns of every slot, and where it stands in them.

Shapes: T steps of a trajectory, K environments of an actor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.envs.vector import Group, StepRows
from echelon.roles.acting import Question
from echelon.schema import TrajectorySchema

Array = np.ndarray[Any, Any]
UNSTAMPED = np.iinfo(np.int64).max  # the version of a step that nobody has chosen an action for yet


@dataclass(slots=True)
class Row:
    """One step of a slot, every view made beforehand: the hot path slices nothing."""

    question: Question
    action: Array
    log_prob: Array
    version: Array  # (1,), which the teams share
    step: StepRows
    next_first: Array


class Page:
    """A team's columns of one slot, as rows."""

    def __init__(self, schema: TrajectorySchema, views: dict[str, Array], columns: slice) -> None:
        names, space = schema.observation_names, schema.spaces.observation
        T = schema.num_steps
        self.observations = [[views[name][t, columns] for name in names] for t in range(T + 1)]
        self.firsts = [views["first"][t, columns] for t in range(T + 1)]
        self.state = [views[f"state.{i}"][columns] for i in range(len(schema.state_shapes))]
        self.rows = [
            Row(
                question=Question.of(space, self.observations[t], self.firsts[t]),
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

    def __init__(self, index: int, group: Group, columns: slice, pages: list[Page], trajectory: int) -> None:
        self.index, self.group, self.columns = index, group, columns
        self.trajectory, self.t = trajectory, 0
        self.page: Page | None = None
        self._pages = pages
        # The first row of the next trajectory: the last of the one before.
        self.observation = [np.zeros_like(leaf) for leaf in pages[0].observations[0]]
        self.first = np.ones(group.num_envs, np.bool_)

    def enter(self) -> Page:
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
