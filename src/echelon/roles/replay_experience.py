"""Replay experience: the steps of an actor's teams become n-step transitions in its replay shard.

A step is looked at again when the next one is made: only then is it known what the policy thinks of what followed, from
which a transition gets its first priority (Horgan et al., 2018). Nobody admits single trajectories; the limiter says
when the actor may go on, and wakes it. If the actor dies, its successor goes on at the shard's head: transitions that
were open are lost, and nothing else.

Shapes: K environments of a team, M transitions that a step completes, S frames of a stack.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from echelon.config import TrainConfig
from echelon.errors import DivergedError, diverged
from echelon.objectives.values import initial_priorities
from echelon.replay.frames import FrameWriter
from echelon.replay.nstep import NStep, Transitions
from echelon.replay.shard import ShardWriter
from echelon.replay.sum_tree import MAX_PRIORITY
from echelon.roles.acting import ActReply
from echelon.roles.context import Station
from echelon.roles.experience import EpisodeLedger, Row, SlotRows, Team
from echelon.roles.frame_stacks import stack_leaves
from echelon.schema import TrajectorySchema

if TYPE_CHECKING:
    from echelon.roles.plan.replay import ReplayPlan

Array = np.ndarray[Any, Any]
START_POLL_S = 0.02  # between looks at whether the learner has opened the run


@dataclass(slots=True)
class Window:
    """What is under way in the environments of one team."""

    nstep: NStep
    ledger: EpisodeLedger
    views: dict[str, Array]  # its columns of the page
    frames: dict[str, FrameWriter] = field(default_factory=dict)  # by leaf
    complete: Transitions | None = None  # by the last step; they wait for the next


class ReplayExperience:
    """Transitions in the actor's shard."""

    def __init__(self, plan: ReplayPlan, schema: TrajectorySchema, actor: int, station: Station) -> None:
        config: TrainConfig = plan.config
        self.actor, self.station, self.schema = actor, station, schema
        self.n_step, self.discount = config.replay.n_step, config.algorithm.discount
        self.clip, self.prioritized = config.algorithm.reward_clip, config.replay.prioritized
        self.writer, self.limiter, self.tally = ShardWriter(plan.shard(actor)), plan.limiter(), plan.tally()
        self.limiter.note_inserted(actor, self.writer.head)  # a predecessor may have died before it said so
        self.chunk, self.learning_rate = plan.rule.chunk, config.optimizer.learning_rate
        self.paths = schema.observation_names
        self.kept = (*self.paths, "action", "version")  # of the step that a transition starts at
        self.stacks = [leaf.path for leaf in stack_leaves(config, schema.spaces)]
        self.views = schema.views(np.zeros(schema.nbytes, np.uint8))
        self.windows: dict[int, Window] = {}

    @property
    def head(self) -> int:
        return 0

    def pages(self, index: int, columns: slice) -> list[SlotRows]:
        views = {name: view[:, columns] for name, view in self.views.items() if view.ndim > 1}
        num_envs = columns.stop - columns.start
        nstep = NStep(num_envs, self.n_step, self.discount)
        frames = {path: FrameWriter(self.writer, path, num_envs) for path in self.stacks}
        self.windows[index] = Window(nstep, EpisodeLedger(num_envs), views, frames)
        return [SlotRows(self.schema, self.views, columns)]

    def admits(self, trajectory: int) -> bool:
        del trajectory
        return self.tally.is_open and self.limiter.may_insert(self.chunk)

    def open(self, trajectory: int) -> None:
        """Versions go with the transitions."""

    def stepped(self, team: Team, row: Row, answer: ActReply) -> None:
        window = self.windows[team.index]
        self._check(team, row)
        seen = dict(zip(self.paths, row.question.leaves, strict=True))
        seen |= {path: frames.store(seen[path]) for path, frames in window.frames.items()}
        if window.complete is not None and len(window.complete.envs):
            self._append(window.complete, seen, answer)
        start = {**seen, "action": row.action, "version": np.full(len(row.action), answer.version)}
        if answer.values is not None:
            start["chosen"] = answer.values.chosen
        step = row.step
        reward = np.clip(step.reward, -self.clip, self.clip) if self.clip else step.reward
        window.complete = window.nstep.push(start, reward, (step.terminated, step.truncated), step.valid)
        self._check_sums(team, window.complete)

    def _append(self, done: Transitions, seen: dict[str, Array], answer: ActReply) -> None:
        """Stores transitions whose last observation is what was `seen` before the newest step."""
        fields = {name: done.start[name] for name in self.kept}
        fields |= {f"next_{path}": seen[path][done.envs] for path in self.paths}
        fields |= {"reward": done.reward, "discount": done.discount}
        if not self.prioritized:
            priorities = np.ones(len(done.envs))
        elif answer.values is None:
            priorities = np.full(len(done.envs), self.tally.top_priority)
        else:
            chosen, best = done.start["chosen"], answer.values.best[done.envs]
            with np.errstate(over="ignore", invalid="ignore"):
                priorities = initial_priorities(chosen, done.reward, done.discount, best).astype(np.float64)
            worst = int(priorities.argmax())  # NaN is the largest of all, and below nothing
            if not priorities[worst] <= MAX_PRIORITY:
                values = f"an action of actor {self.actor} at {chosen[worst]} and what followed at {best[worst]}"
                raise diverged(f"the policy of version {answer.version} values {values}", self.learning_rate)
        head = self.writer.append(fields, priorities)
        self.limiter.note_inserted(self.actor, head + len(priorities))

    def _check(self, team: Team, row: Row) -> None:
        """Refuses NaN and infinity before anything learns from them."""
        step = row.step
        names = ("reward", *self.paths)
        for name, array in zip(names, (step.reward, *step.observation), strict=True):
            with np.errstate(over="ignore", invalid="ignore"):  # one look at all of it; a sum may overflow
                if array.dtype.kind != "f" or np.isfinite(array.sum()):
                    continue
            bad = np.argwhere(~np.isfinite(array))
            if len(bad):
                env = int(bad[0][0])
                raise DivergedError(
                    f"{name} is {array[tuple(bad[0])]} after a step of actor {self.actor}, environment "
                    f"{team.columns.start + env} (index {bad[0][1:].tolist()} of the value). The environment must give "
                    "finite numbers: check it, or wrap it to clip what it gives."
                )

    def _check_sums(self, team: Team, done: Transitions) -> None:
        """Refuses rewards that are finite one by one and not when they are summed."""
        beyond = np.flatnonzero(~np.isfinite(done.reward))
        if len(beyond):
            raise DivergedError(
                f"the sum of rewards over {self.n_step} steps is {done.reward[beyond[0]]} after a step of actor "
                f"{self.actor}, environment {team.columns.start + int(done.envs[beyond[0]])}: float32 cannot hold it. "
                "Scale the rewards in the environment, or clip them (--algorithm.reward-clip)."
            )

    def left(self, team: Team, teams: Sequence[Team]) -> None:
        del teams
        window = self.windows[team.index]
        window.ledger.record(window.views)
        ended = window.views["episode_length"].nonzero()
        returns, lengths = (window.views[name][ended] for name in ("episode_return", "episode_length"))
        self.tally.note(self.actor, int(window.views["valid"].sum()), returns, lengths)

    def wait(self, teams: Sequence[Team], timeout_s: float) -> None:
        del teams
        if not self.tally.is_open:
            self.station.wait(min(timeout_s, START_POLL_S), [])
            return
        start = time.perf_counter()
        self.limiter.wait_to_insert(self.chunk, timeout_s)
        self.station.waited(start)

    def close(self) -> None:
        """Segments go with the session."""
