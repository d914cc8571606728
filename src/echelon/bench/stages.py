"""The three stages of a training alone: stepping environments, acting, learning, each with the run's own classes.

Shapes: T steps of a trajectory, K environments of a group.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echelon.algorithms import build_algorithm
from echelon.algorithms.exploration import Explorer
from echelon.algorithms.model import Policy
from echelon.bench.gradients import GradientLearning
from echelon.bench.replayed import ReplayLearning
from echelon.config import TrainConfig, replace
from echelon.envs.make import env_seeds, make_group, probe_spaces
from echelon.envs.vector import StepRows
from echelon.networks import action_mask
from echelon.roles.acting import Acting, Exploring, Question
from echelon.roles.actor import LocalActing
from echelon.roles.context import Context
from echelon.roles.plan.layouts import window
from echelon.roles.plan.parts import Plan
from echelon.roles.queue_source import QueueSource
from echelon.roles.update import LocalUpdate, LossAccount, learn_once
from echelon.schema import TrajectorySchema

Array = np.ndarray[Any, Any]
LATE = 1 << 40  # environment steps: after those that only explore
BENCH_ACTOR = 1 << 21  # an actor number that no actor has: the stages share no seed with training


@dataclass(frozen=True, slots=True)
class Cost:
    """What one environment step costs in a stage: the medians over the chunks, in microseconds."""

    cpu_us: float
    wall_us: float


def measure(stages: Mapping[str, Callable[[], float]], *, num_chunks: int, chunk_s: float) -> dict[str, Cost]:
    """The cost of every stage; a stage does some work and returns how many environment steps that was.

    The stages take turns, chunk by chunk, so that a slow moment of the machine falls on all of them alike.
    """
    chunks: dict[str, list[Cost]] = {name: [] for name in stages}
    for stage in stages.values():
        stage()  # the first call allocates and compiles
    for _ in range(num_chunks):
        for name, stage in stages.items():
            chunks[name].append(_chunk(stage, chunk_s))
    return {
        name: Cost(statistics.median(c.cpu_us for c in costs), statistics.median(c.wall_us for c in costs))
        for name, costs in chunks.items()
    }


def _chunk(stage: Callable[[], float], chunk_s: float) -> Cost:
    steps, start, start_cpu = 0.0, time.perf_counter(), time.process_time()
    while (elapsed_s := time.perf_counter() - start) < chunk_s or not steps:
        steps += stage()
    cpu_s = time.process_time() - start_cpu
    return Cost(1e6 * cpu_s / steps, 1e6 * elapsed_s / steps)


def stage_context(config: TrainConfig, session: Path) -> Context:
    """The context of a run whose roles never start: what the memory and the model are made of."""
    context = Context(
        name="bench",
        index=0,
        incarnation=0,
        epoch=0,
        train=config,
        spaces=probe_spaces(config.env),
        state_shapes=(),
        session=session,
        address="",
        run_dir=session,
        started_at=time.monotonic(),
    )
    return dataclasses.replace(context, state_shapes=Plan(context).model.network.state_shapes)


class Collecting:
    """One group of environments and the policy that acts in it, over one slot."""

    def __init__(self, plan: Plan) -> None:
        config = plan.context.train
        seeds = env_seeds(config.seed, BENCH_ACTOR, 0, config.actor.envs + 1)
        self.acting = _acting(plan, seeds[-1])
        self.distribution = plan.model.distribution
        self.group = make_group(config.env, seeds[:-1])
        self.schema = plan.schema
        self.views = plan.schema.views(np.zeros(plan.schema.nbytes, np.uint8))
        self.rows = [_step_rows(self.schema, self.views, t) for t in range(self.schema.num_steps)]
        names, space = self.schema.observation_names, self.schema.spaces.observation
        self.questions = [
            Question.of(space, [self.views[name][t] for name in names], self.views["first"][t])
            for t in range(self.schema.num_steps)
        ]
        self.is_masked = action_mask(self.questions[0].observation) is not None
        self.random_actions = [] if self.is_masked else self._draw_actions()
        shape = (self.schema.num_steps, self.schema.num_envs, self.distribution.num_params)
        self.scores = torch.rand(shape, generator=torch.Generator().manual_seed(seeds[-1]))  # of masked actions
        self.views["first"][0] = True
        self.group.reset([self.views[name][0] for name in names])
        self._roll_out()

    def _draw_actions(self) -> list[Array]:
        space, schema = self.group.spaces.action, self.schema
        return [np.stack([space.sample() for _ in range(schema.num_envs)]) for _ in range(schema.num_steps)]

    def _roll_out(self) -> None:
        """Fills the slot as an actor does."""
        for t, row in enumerate(self.rows):
            self.group.step(self._act(t), row)
            np.logical_not(row.valid, out=self.views["first"][t + 1])

    def _act(self, t: int) -> Array:
        """The actions for row `t`, written down; returns what the environments receive."""
        self.acting.submit(0, self.questions[t])
        answer = self.acting.collect(0)
        assert answer is not None, "local acting answers at once"
        self.views["action"][t] = answer.action
        self.views["log_prob"][t] = answer.log_prob
        return self.distribution.to_env(answer.action)

    def env(self) -> int:
        """T steps of every environment under random actions, resets included.

        Where the environments mask actions, drawing allowed ones is part of it: some 20 us for all of them together.
        """
        if self.is_masked:
            for name in self.schema.observation_names:
                self.views[name][0] = self.views[name][-1]  # the masks of the first step: go on where they stand
        for t, row in enumerate(self.rows):
            self.group.step(self._allowed(t) if self.is_masked else self.random_actions[t], row)
        self.group.failures.clear()
        return self.schema.num_steps * self.schema.num_envs

    def _allowed(self, t: int) -> Array:
        """Random actions that the masks of row `t` allow: those whose scores are highest."""
        mask = action_mask(self.questions[t].observation)
        return self.distribution.to_env(self.distribution.mode(self.scores[t], mask).numpy())

    def act(self) -> int:
        """T times the actions for every environment, written down and made ready for the environments."""
        for t in range(self.schema.num_steps):
            self._act(t)
        return self.schema.num_steps * self.schema.num_envs

    def close(self) -> None:
        self.group.close()


def _acting(plan: Plan, seed: int) -> Acting:
    """What an actor acts with, all of its environments as one group."""
    config = plan.context.train
    num_envs = config.actor.envs
    if config.experience != "replay":
        return LocalActing(Policy(plan.model), plan.board(), num_envs, seed)
    explorer = Explorer(config.algorithm, range(num_envs), num_envs * config.actor.num_actors)
    policy = Policy(plan.model, with_action_values=config.replay.prioritized)
    exploring = Exploring([explorer], lambda: LATE, plan.model.distribution, seed)
    return LocalActing(policy, plan.board(), num_envs, seed, exploring)


def _step_rows(schema: TrajectorySchema, views: dict[str, Array], t: int) -> StepRows:
    observation = [views[name][t + 1] for name in schema.observation_names]
    return StepRows(observation, views["reward"][t], views["terminated"][t], views["truncated"][t], views["valid"][t])


class Learning:
    """The learner's work on slots that are always full: gather a batch, learn from it, publish, admit."""

    def __init__(self, plan: Plan, views: dict[str, Array]) -> None:
        config = plan.context.train
        self.config, self.window = config, window(config)
        self.algorithm = build_algorithm(config.algorithm, plan.model, config.seed)
        # Hardly a learning rate: the same data again and again would drive the weights to where arithmetic is slow.
        self.update = LocalUpdate(replace(config.optimizer, learning_rate=1e-12), plan.model)
        self.model, self.ring, self.board = plan.model, plan.ring(), plan.board()
        self.source = QueueSource(config, plan.schema, self.ring, plan.model.device)
        for slot in (slot for stream in self.ring.slots for slot in stream):
            for name, array in views.items():
                slot[name][...] = array
        self.board.publish(self.model.parts(), self.board.version + 1)
        self.steps_per_batch = config.batch_trajectories * plan.schema.num_steps * plan.schema.num_envs

    def _fill(self) -> None:
        """Commits what the actors would have: all they are admitted to, stamped with the newest version."""
        for stream, ahead in enumerate(self.source.ahead):
            while self.ring.num_ready(stream) < self.window - ahead:
                self.ring.writable(stream)["version"].fill(self.board.version)
                self.ring.commit(stream)

    def learn(self) -> int:
        """One batch."""
        self._fill()
        self.ring.ready.clear()
        version = self.board.version
        batch = self.source.take(version)
        assert batch is not None, f"{self.window} trajectories of every stream made no batch"
        account = LossAccount()
        self.update.schedule(0.0)
        learn_once(self.algorithm, batch, self.update, account)
        self.source.prefetch(version + 1)
        account.newest.tolist()  # the learner looks at it, which is where it waits for a GPU
        self.board.publish(self.model.parts(), version + 1)
        self.source.admit()
        return self.steps_per_batch

    def close(self) -> None:
        self.ring.close()


class Stages:
    """Everything that is measured, made as `config` says, in the memory of `session`; learning happens on `device`.

    Where experience is replayed, `samples_per_step` are drawn for every environment step; nobody is held back here.
    """

    def __init__(self, config: TrainConfig, session: Path, device: str, samples_per_step: float = 0.0) -> None:
        replay = replace(config.replay, samples_per_insert=0.0, transport="shm", checkpoint=False)
        context = stage_context(replace(config, replay=replay), session)
        if device != "cpu":
            torch.set_float32_matmul_precision("high")  # as the learner does
        self.collecting = Collecting(Plan(context))
        plan, views = Plan(context, device=device), self.collecting.views
        self.learning: Learning | ReplayLearning | GradientLearning
        if config.experience == "replay":
            self.learning = ReplayLearning(plan, views, samples_per_step)
        elif config.experience == "gradients":
            self.learning = GradientLearning(plan, views)
        else:
            self.learning = Learning(plan, views)

    def callables(self) -> dict[str, Callable[[], float]]:
        return {"env": self.collecting.env, "act": self.collecting.act, "learn": self.learning.learn}

    def close(self) -> None:
        self.collecting.close()
        self.learning.close()
