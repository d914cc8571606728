"""Replay experience: converts the steps of an actor's teams into n-step transitions in its replay shard.

A transition is stored one step after it is complete, because its initial priority depends on the policy's values for
its last observation (Horgan et al., 2018). Trajectories are not admitted one by one; the limiter decides when the actor
may continue, and wakes it. If the actor dies, its successor continues at the shard's head; only transitions that were
not stored yet are lost. For an actor on another host, the carrier does the same from the trajectories that it receives.

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
from echelon.roles.experience import Row, SlotRows, Team
from echelon.roles.frame_stacks import stack_leaves
from echelon.roles.stopping import stop_reason
from echelon.schema import TrajectorySchema

if TYPE_CHECKING:
    from echelon.roles.plan.replay import ReplayPlan

Array = np.ndarray[Any, Any]
START_POLL_S = 0.02  # interval at which the actor checks whether the learner has opened the run


@dataclass(slots=True)
class Window:
    """The incomplete transitions of one team."""

    nstep: NStep
    page: SlotRows
    first_env: int  # of the team
    frames: dict[str, FrameWriter] = field(default_factory=dict)  # by leaf
    complete: Transitions | None = None  # completed by the last step, to be stored with the next one

    def begin(self) -> None:
        """Drops what is incomplete of environments that begin an episode with the first row of the page.

        Nothing is incomplete after a step that only resets; so this matters only if their actor was replaced.
        """
        first = self.page.firsts[0]
        if first.any():
            self.nstep.clear(first)
            self.complete = self.complete and self.complete.without(first)


class ReplayExperience:
    """Writes transitions into the actor's shard."""

    def __init__(self, plan: ReplayPlan, schema: TrajectorySchema, actor: int, station: Station) -> None:
        config: TrainConfig = plan.config
        self.actor, self.station, self.schema = actor, station, schema
        self.n_step, self.discount = config.replay.n_step, config.algorithm.discount
        self.clip, self.prioritized = config.algorithm.reward_clip, config.replay.prioritized
        self.writer, self.limiter, self.tally = ShardWriter(plan.shard(actor)), plan.limiter(), plan.tally()
        self.limiter.note_inserted(actor, self.writer.head)  # a predecessor may have died before it noted the append
        self.stop, self.exact = config.stop, config.replay.exact
        self.tally.rest(actor, False)
        self.chunk, self.learning_rate = plan.rule.chunk, config.optimizer.learning_rate
        self.paths = schema.observation_names
        self.kept = (*self.paths, "action", "version")  # fields stored from the first step of a transition
        self.stacks = [leaf.path for leaf in stack_leaves(config, schema.spaces)]
        self.memory = np.zeros(schema.nbytes, np.uint8)
        self.views = schema.views(self.memory)
        self.windows: dict[int, Window] = {}

    @property
    def head(self) -> int:
        return 0

    def pages(self, index: int, columns: slice) -> list[SlotRows]:
        page = SlotRows(self.schema, self.views, columns)
        num_envs = columns.stop - columns.start
        nstep = NStep(num_envs, self.n_step, self.discount)
        frames = {path: FrameWriter(self.writer, path, num_envs) for path in self.stacks}
        self.windows[index] = Window(nstep, page, columns.start, frames)
        return [page]

    def admits(self, trajectory: int) -> bool:
        del trajectory
        return self.may_store()

    def may_store(self, num: int = 1) -> bool:
        """Returns whether `num` trajectories may be stored."""
        return self.tally.is_open and not self._is_over and self.limiter.may_insert(num * self.chunk)

    @property
    def _is_over(self) -> bool:
        """Whether the run has its steps or episodes: then the learner catches up, and nothing more may become due."""
        if not self.exact:
            return False
        return stop_reason(self.stop, self.tally.env_steps, (), 0.0, self.tally.episodes) != ""

    def open(self, trajectory: int) -> None:
        """Does nothing: every transition carries its own version."""

    def stepped(self, team: Team, row: Row, reply: ActReply) -> None:
        self.store(self.windows[team.index], row, reply, team.group.seeds)

    def store(self, window: Window, row: Row, reply: ActReply, seeds: Sequence[int] = ()) -> None:
        """Adds one step, and stores the transitions that the step before it has completed.

        `seeds` are those of the environments, where they are known.
        """
        self._check(window, row, seeds)
        seen = dict(zip(self.paths, row.request.leaves, strict=True))
        seen |= {path: frames.store(seen[path]) for path, frames in window.frames.items()}
        if window.complete is not None and len(window.complete.envs):
            self._append(window.complete, seen, reply)
        start = {**seen, "action": row.action, "version": np.full(len(row.action), reply.version)}
        if reply.values is not None:
            start["chosen"] = reply.values.chosen
        step = row.step
        reward = np.clip(step.reward, -self.clip, self.clip) if self.clip else step.reward
        window.complete = window.nstep.push(start, reward, (step.terminated, step.truncated), step.valid)
        self._check_sums(window, window.complete)

    def _append(self, done: Transitions, seen: dict[str, Array], reply: ActReply) -> None:
        """Stores complete transitions. `seen` holds their last observation, to which `reply` is the reply."""
        fields = {name: done.start[name] for name in self.kept}
        fields |= {f"next_{path}": seen[path][done.envs] for path in self.paths}
        fields |= {"reward": done.reward, "discount": done.discount}
        if not self.prioritized:
            priorities = np.ones(len(done.envs))
        elif reply.values is None:
            priorities = np.full(len(done.envs), self.tally.top_priority)
        else:
            chosen, best = done.start["chosen"], reply.values.best[done.envs]
            with np.errstate(over="ignore", invalid="ignore"):
                priorities = initial_priorities(chosen, done.reward, done.discount, best).astype(np.float64)
            worst = int(priorities.argmax())  # argmax finds NaN, and no comparison with NaN is true
            if not priorities[worst] <= MAX_PRIORITY:
                values = f"an action of actor {self.actor} at {chosen[worst]} and the next state at {best[worst]}"
                raise diverged(f"the policy of version {reply.version} values {values}", self.learning_rate)
        head = self.writer.append(fields, priorities)
        self.limiter.note_inserted(self.actor, head + len(priorities))

    def _check(self, window: Window, row: Row, seeds: Sequence[int]) -> None:
        """Raises DivergedError if a reward or an observation is NaN or infinite."""
        step = row.step
        names = ("reward", *self.paths)
        for name, array in zip(names, (step.reward, *step.observation), strict=True):
            with np.errstate(over="ignore", invalid="ignore"):  # fast check by one sum, which may itself overflow
                if array.dtype.kind != "f" or np.isfinite(array.sum()):
                    continue
            bad = np.argwhere(~np.isfinite(array))
            if len(bad):
                env = int(bad[0][0])
                seed = f" (seed {seeds[env]})" if seeds else ""
                raise DivergedError(
                    f"{name}{bad[0][1:].tolist() or ''} is {array[tuple(bad[0])]} after a step of actor {self.actor}, "
                    f"environment {window.first_env + env}{seed}. The environment must return finite numbers: check "
                    "it, or wrap it to clip them."
                )

    def _check_sums(self, window: Window, done: Transitions) -> None:
        """Raises DivergedError if the sum of finite rewards is not finite."""
        beyond = np.flatnonzero(~np.isfinite(done.reward))
        if len(beyond):
            raise DivergedError(
                f"the sum of rewards over {self.n_step} steps is {done.reward[beyond[0]]} after a step of actor "
                f"{self.actor}, environment {window.first_env + int(done.envs[beyond[0]])}: it overflows float32. "
                "Scale the rewards in the environment, or clip them (--algorithm.reward-clip)."
            )

    def left(self, team: Team, teams: Sequence[Team]) -> None:
        del teams
        self.count(self.windows[team.index])

    def count(self, window: Window, before: tuple[int, int] | None = None) -> None:
        """Counts the steps and episodes of a complete trajectory; `before` as in `Tally.note`."""
        episodes = window.page.episodes
        at = episodes["episode_length"].nonzero()
        envs = window.first_env + at[1]
        ended = np.stack((episodes["episode_return"][at], episodes["episode_length"][at], envs), -1)
        self.tally.note(self.actor, int(episodes["valid"].sum()), ended, before)

    def wait(self, teams: Sequence[Team], timeout_s: float) -> None:
        del teams
        if self._is_over:
            self.tally.rest(self.actor, True)
        if not self.tally.is_open or self._is_over:
            self.station.wait(min(timeout_s, START_POLL_S), [])
            return
        start = time.perf_counter()
        self.limiter.wait_to_insert(timeout_s)
        self.station.waited(start)

    def close(self) -> None:
        """Does nothing: the shared memory is removed with the session."""
