"""The learner's stage of a training that replays: drawing, learning and publishing, over shards filled once."""

from __future__ import annotations

from typing import Any

import numpy as np

from echelon.algorithms import build_algorithm
from echelon.algorithms.protocol import Group
from echelon.config import replace
from echelon.replay.frames import FrameWriter
from echelon.replay.shard import ShardWriter
from echelon.roles.frame_stacks import stack_leaves
from echelon.roles.plan.parts import Plan
from echelon.roles.replay_source import ReplaySource
from echelon.roles.update import LocalUpdate, LossAccount, make_learning

Array = np.ndarray[Any, Any]
RATE = 1e-12  # hardly a learning rate: the same data again would drive the weights to where arithmetic is slow


class ReplayLearning:
    """Draws a batch, learns from it, gives back its priorities and publishes, as often as nobody else does."""

    def __init__(self, plan: Plan, views: dict[str, Array], samples_per_step: float) -> None:
        """`views` is a trajectory to fill the shards with; `samples_per_step` are drawn for every environment step."""
        config = plan.context.train
        self.steps_per_batch = config.replay.batch / samples_per_step
        plan.replay.make()
        for index in range(config.num_shards):
            _fill(plan, index, views)
        self.model, self.board = plan.model, plan.board()
        algorithm = build_algorithm(config.algorithm, self.model, config.seed)
        groups = {name: Group(group.module, RATE) for name, group in algorithm.groups.items()}
        update = LocalUpdate(replace(config.optimizer, learning_rate=RATE), self.model, groups)
        self.learning, self.account = make_learning(config, algorithm, update), LossAccount()
        self.source = ReplaySource(plan.replay, self.model.device)
        self.source.admit()
        self.num_learned = 0
        self.board.publish(self.model.parts(), self.board.version + 1)

    def learn(self) -> float:
        """One batch; returns how many environment steps it stands for."""
        version, on_gpu = self.board.version, self.model.device.type == "cuda"
        batch = self.source.take(version)
        assert batch is not None, "shards that are full enough made no batch"
        self.learning(batch, self.account, lambda: None, self.source.acknowledge)
        self.num_learned += 1
        self.account.close_batch(self.num_learned)
        self.source.prefetch(version + 1)
        is_publishing = self.num_learned % self.source.publish_every == 0
        self.account.find_lost(keep=int(on_gpu and not is_publishing))
        if is_publishing:
            self.account.take()
            self.board.publish(self.model.parts(), version + 1)
        return self.steps_per_batch

    def close(self) -> None:
        self.source.close()


def _fill(plan: Plan, index: int, views: dict[str, Array]) -> None:
    """Appends the steps of a trajectory to a shard as transitions, until its part of the smallest replay is there."""
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
