"""Measures the three stages of a training separately, with the run's classes: stepping environments, acting, learning.

Shapes: T steps of a trajectory, K environments of a group.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from echelon.algorithms import build_algorithm
from echelon.algorithms.a3c import A3c
from echelon.algorithms.protocol import ParameterGroup
from echelon.bench.harness import repeat
from echelon.config import A3cConfig, TrainConfig
from echelon.config import replace as replace_fields
from echelon.envs.make import env_seeds, make_group, probe_spaces
from echelon.envs.vector import StepRows
from echelon.networks import action_mask
from echelon.replay.frames import FrameWriter
from echelon.replay.shard import ShardWriter
from echelon.roles.acting import ActRequest
from echelon.roles.context import Context
from echelon.roles.frame_stacks import stack_leaves
from echelon.roles.gradient_slots import write
from echelon.roles.gradient_source import GradientSource
from echelon.roles.loss_account import LossAccount
from echelon.roles.plan.parts import Plan
from echelon.roles.queue_source import QueueSource, Staging
from echelon.roles.replay_source import ReplaySource
from echelon.roles.source import Source
from echelon.roles.update import LocalUpdate, make_learning

Array = np.ndarray[Any, Any]
LATE = 1 << 40  # environment steps: beyond the initial exploration
BENCH_ACTOR = 1 << 21  # an actor index that no actor has, so that the stages share no seed with the training
RATE = 1e-12  # almost 0: repeating the same data would drive the weights to values where arithmetic is slow


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of one environment step in a stage: medians over the chunks, in microseconds."""

    cpu_us: float
    wall_us: float


@dataclass(frozen=True, slots=True)
class Stage:
    """A unit of work, and the number of environment steps it corresponds to."""

    work: Callable[[], object]
    num_steps: float


def measure(stages: Mapping[str, Stage], *, num_chunks: int, chunk_s: float) -> dict[str, StepCost]:
    """Returns the cost of every stage.

    The stages alternate, chunk by chunk, so that a slow phase of the machine affects all of them.
    """
    chunks: dict[str, list[StepCost]] = {name: [] for name in stages}
    for stage in stages.values():
        stage.work()  # the first call allocates and compiles
    for _ in range(num_chunks):
        for name, stage in stages.items():
            done = repeat(stage.work, chunk_s)
            scale = 1e6 / (done.count * stage.num_steps)
            chunks[name].append(StepCost(scale * done.cpu_s, scale * done.wall_s))
    return {
        name: StepCost(statistics.median(c.cpu_us for c in costs), statistics.median(c.wall_us for c in costs))
        for name, costs in chunks.items()
    }


class TrainingStages:
    """The stages of `config`, in the memory of `session`; the learner runs on `device`.

    With replay, `samples_per_step` transitions are sampled per environment step; the rate limiter does not block.
    """

    def __init__(self, config: TrainConfig, session: Path, device: str, samples_per_step: float = 0.0) -> None:
        changes: dict[str, Any] = {"replay.samples_per_insert": 0.0, "replay.exact": False}
        changes |= {"replay.transport": "shm", "replay.checkpoint": False, "acting.mode": "local"}
        changes["optimizer.learning_rate"] = RATE
        context = stage_context(replace_fields(config, **changes), session)
        if device != "cpu":
            torch.set_float32_matmul_precision("high")  # as the learner does
        self.collecting = Collecting(Plan(context))
        plan, views = Plan(context, device=device), self.collecting.views
        self.learning = make_learning_stage(plan, views, samples_per_step)

    def by_name(self) -> dict[str, Stage]:
        collecting, learning = self.collecting, self.learning
        steps = collecting.schema.num_steps * collecting.schema.num_envs
        return {
            "env": Stage(collecting.step, steps),
            "act": Stage(collecting.act, steps),
            "learn": Stage(learning.learn, learning.num_steps),
        }

    def close(self) -> None:
        self.collecting.close()
        self.learning.close()


def stage_context(config: TrainConfig, session: Path) -> Context:
    """Returns the context of a run whose roles never start, to create its memory and model."""
    context = Context(
        name="bench",
        index=0,
        incarnation=0,
        generation=0,
        train=config,
        spaces=probe_spaces(config.env),
        state_shapes=(),
        session=session,
        address="",
        run_dir=session,
        started_at=time.monotonic(),
    )
    return replace(context, state_shapes=Plan(context).model.network.state_shapes)


class Collecting:
    """One group of environments with its policy, writing to one slot."""

    def __init__(self, plan: Plan) -> None:
        config = plan.context.train
        seeds = env_seeds(config.seed, BENCH_ACTOR, 0, config.actor.envs_per_actor + 1)
        self.acting = plan.local_acting(seeds[-1], lambda: LATE)
        self.distribution = plan.model.distribution
        self.group = make_group(config.env, seeds[:-1])
        schema = self.schema = plan.schema
        views = self.views = schema.views(np.zeros(schema.nbytes, np.uint8))
        names, space = schema.observation_names, schema.spaces.observation
        self.rows, self.questions = list[StepRows](), list[ActRequest]()
        for t in range(schema.num_steps):
            later = [views[name][t + 1] for name in names]
            flags = [views[name][t] for name in ("terminated", "truncated", "valid")]
            self.rows.append(StepRows(later, views["reward"][t], *flags))
            self.questions.append(ActRequest.of(space, [views[name][t] for name in names], views["first"][t]))
        self.is_masked = action_mask(self.questions[0].observation) is not None
        self.random_actions = [] if self.is_masked else self._draw_actions()
        shape = (schema.num_steps, schema.num_envs, self.distribution.num_params)
        self.scores = torch.rand(
            shape, generator=torch.Generator().manual_seed(seeds[-1])
        )  # for choosing among allowed actions
        views["first"][0] = True
        self.group.reset([views[name][0] for name in names])
        self.roll_out()

    def _draw_actions(self) -> list[Array]:
        """Returns random actions of all environments for every step."""
        space, schema = self.group.spaces.action, self.schema
        return [np.stack([space.sample() for _ in range(schema.num_envs)]) for _ in range(schema.num_steps)]

    def roll_out(self) -> None:
        """Fills the slot, as an actor does."""
        for t, row in enumerate(self.rows):
            self.group.step(self._act(t), row)
            np.logical_not(row.valid, out=self.views["first"][t + 1])

    def _act(self, t: int) -> Array:
        """Computes and stores the actions of row `t`; returns them in the environments' units."""
        self.acting.submit(0, self.questions[t])
        answer = self.acting.collect(0)
        assert answer is not None, "local acting replies immediately"
        self.views["action"][t] = answer.action
        self.views["log_prob"][t] = answer.log_prob
        return self.distribution.to_env(answer.action)

    def step(self) -> None:
        """Makes T steps of every environment with random actions, including resets.

        If the environments mask actions, choosing allowed ones is included: about 20 us for all of them together.
        """
        if self.is_masked:
            for name in self.schema.observation_names:
                self.views[name][0] = self.views[name][-1]  # the masks of the first step continue from the last row
        for t, row in enumerate(self.rows):
            self.group.step(self._allowed(t) if self.is_masked else self.random_actions[t], row)
        self.group.failures.clear()

    def _allowed(self, t: int) -> Array:
        """Returns random actions that the masks of row `t` allow: those with the highest scores."""
        mask = action_mask(self.questions[t].observation)
        return self.distribution.to_env(self.distribution.mode(self.scores[t], mask).numpy())

    def act(self) -> None:
        """Computes, stores and converts the actions of every environment T times."""
        for t in range(self.schema.num_steps):
            self._act(t)

    def close(self) -> None:
        self.group.close()


class LearnStage:
    """The learner's work on a batch, repeated: take it, learn from it, publish and admit.

    Before every turn `feed` writes the experience of one batch, so that nothing waits. If actors compute gradients, it
    writes those of one rollout, and the learner uses all batches of them.
    """

    def __init__(self, plan: Plan, source: Source, feed: Callable[[], None], num_steps: float) -> None:
        config = plan.context.train
        self.source, self.feed, self.num_steps = source, feed, num_steps
        self.is_one_batch = not isinstance(source, GradientSource)
        self.model, self.board, self.account = plan.model, plan.board(), LossAccount()
        self.algorithm = build_algorithm(config.algorithm, plan.model, config.seed)
        groups = {name: ParameterGroup(group.module, RATE) for name, group in self.algorithm.groups.items()}
        self.update = LocalUpdate(config.optimizer, plan.model, groups)
        self.learn_batch = make_learning(config, self.algorithm, self.update)
        self.num_learned = 0
        self._publish()

    def learn(self) -> None:
        self.feed()
        while (batch := self.source.take(self.board.version)) is not None:
            self._learn(batch)
            if self.is_one_batch:
                return
        assert not self.is_one_batch, "the experience of `feed` made no batch"

    def _learn(self, batch: Any) -> None:
        self.update.schedule(0.0)
        self.learn_batch(batch, self.account, lambda: None, self.source.acknowledge)
        self.num_learned += 1
        self.account.close_batch(self.num_learned)
        is_publishing = self.num_learned % self.source.publish_every == 0
        self.source.prefetch(self.board.version + is_publishing)
        # As the learner does: it reads all losses but the newest, which is where it waits for a GPU.
        self.account.find_non_finite(keep=int(self.model.device.type == "cuda" and not is_publishing))
        if is_publishing:
            self.account.take()
            self._publish()

    def _publish(self) -> None:
        self.board.publish(self.model.parts(), self.board.version + 1)
        self.source.admit()

    def close(self) -> None:
        self.source.close()


def make_learning_stage(plan: Plan, views: dict[str, Array], samples_per_step: float) -> LearnStage:
    """Returns the learning stage for the run's kind of experience, from the trajectory `views`."""
    config, schema = plan.context.train, plan.schema
    plan.make()
    source, num_steps = plan.source(plan.model.device), schema.num_steps * schema.num_envs
    match source:
        case ReplaySource():
            for index in range(config.num_shards):
                _fill_shard(plan, index, views)
            return LearnStage(plan, source, lambda: None, config.replay.batch / samples_per_step)
        case GradientSource():
            return LearnStage(plan, source, _gradients(plan, views), num_steps)
        case QueueSource():
            return LearnStage(plan, source, _trajectories(plan, source, views), config.batch_trajectories * num_steps)
    raise AssertionError(f"no feed for a {type(source).__name__}")


def _trajectories(plan: Plan, source: QueueSource, views: dict[str, Array]) -> Callable[[], None]:
    """Fills all slots with the same trajectory; returns the feed."""
    ring, board = source.ring, plan.board()
    for slot in (slot for stream in range(ring.num_streams) for slot in ring.slots(stream)):
        for name, array in views.items():
            slot[name][...] = array

    def feed() -> None:
        """Commits all trajectories that the actors are admitted to, in the newest version."""
        for stream, ahead in enumerate(source.ahead):
            while ring.num_ready(stream) < ring.num_slots - ahead:
                ring.writable(stream)["version"].fill(board.version)
                ring.commit(stream)
        ring.ready.clear()

    return feed


def _gradients(plan: Plan, views: dict[str, Array]) -> Callable[[], None]:
    """Returns a feed that computes the gradients of one rollout, for one actor after the other."""
    config, ring, board = plan.context.train, plan.ring(), plan.board()
    rule = A3c(cast(A3cConfig, config.algorithm), Plan(plan.context).model)
    streams = itertools.cycle(range(ring.num_streams))
    rollout = Staging(plan.schema, 1, torch.device("cpu"))
    rollout.put(0, 0, views)
    rollout.move()

    def feed() -> None:
        stream = next(streams)
        views["version"].fill(board.version)
        for columns, gradient in zip(rule.columns(rollout.num_envs), rule.gradients(rollout.batch), strict=True):
            write(ring.writable(stream), gradient, views, columns)
            ring.commit(stream)
        ring.ready.clear()

    return feed


def _fill_shard(plan: Plan, index: int, views: dict[str, Array]) -> None:
    """Appends the steps of a trajectory to a shard as transitions, until its part of `replay.min_size` is filled."""
    config, schema = plan.context.train, plan.schema
    writer, limiter = ShardWriter(plan.replay.shard(index)), plan.replay.limiter()
    leaves = stack_leaves(config, plan.context.spaces)
    frames = {leaf.path: FrameWriter(writer, leaf.path, schema.num_envs) for leaf in leaves}
    ones = np.ones(schema.num_envs)

    def observed(t: int) -> dict[str, Array]:
        seen = {name: views[name][t] for name in schema.observation_names}
        return seen | {path: frame.store(seen[path]) for path, frame in frames.items()}

    while writer.head < config.replay.min_size / config.num_shards:
        seen = observed(0)
        for t in range(schema.num_steps):
            after = observed(t + 1)
            fields = {**seen, **{f"next_{name}": leaf for name, leaf in after.items()}}
            fields |= {"action": views["action"][t], "version": np.zeros(schema.num_envs, np.int64)}
            fields |= {"reward": views["reward"][t], "discount": 0.99 * ones}
            writer.append(fields, ones)
            seen = after
    limiter.note_inserted(index, writer.head)
