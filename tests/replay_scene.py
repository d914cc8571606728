"""Shards that a test writes, and the source of a learner that samples from them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from echelon.config import TrainConfig, replace
from echelon.presets import preset
from echelon.replay.shard import ShardWriter
from echelon.roles.context import Context
from echelon.roles.plan.replay import ReplayPlan
from echelon.roles.replay_source import ReplaySource
from echelon.schema import Spaces, TransitionBatch

BATCH, MIN_SIZE, CAPACITY = 8, 20, 400
SPACES = Spaces(
    gym.spaces.Dict({"eye": gym.spaces.Box(-9.0, 9.0, (2,)), "count": gym.spaces.Discrete(9)}), gym.spaces.Discrete(5)
)
FIELDS = {"actor.num_actors": 2, "actor.envs": 1, "actor.trajectory": 4, "replay.n_step": 1, "replay.batch": BATCH}
FIELDS |= {"replay.min_size": MIN_SIZE, "replay.capacity": 2 * CAPACITY, "replay.samples_per_insert": 4.0}


class Scene:
    """A source over shards that the test writes; item n has n in every field (1000 + n in the second shard)."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        session = folder / "session"
        session.mkdir(exist_ok=True)
        config: TrainConfig = replace(preset("apex-dqn", "CartPole-v1"), **{**FIELDS, **fields})
        context = Context(
            name="learner", index=0, incarnation=0, generation=0, train=config, spaces=SPACES, state_shapes=(),
            session=session, address="", run_dir=folder / "run", started_at=time.monotonic(),
        )  # fmt: skip
        self.plan = ReplayPlan(context)
        self.plan.make()
        self.writers = [ShardWriter(self.plan.shard(index)) for index in range(2)]
        self.limiter, self.tally = self.plan.limiter(), self.plan.tally()
        self.source = self.make()

    def make(self, device: str = "cpu") -> ReplaySource:
        source = ReplaySource(self.plan, torch.device(device))
        source.admit()
        return source

    def write(self, shard: int, count: int, priority: float = 1.0, version: int = 1) -> None:
        writer = self.writers[shard]
        numbers = np.arange(writer.head, writer.head + count) + 1000 * shard
        small = numbers.astype(np.float32)
        eye = np.stack([small, -small], 1)
        writer.append(
            {
                **{"observation.eye": eye, "next_observation.eye": eye + 0.5, "reward": small, "discount": small},
                **{"observation.count": numbers, "next_observation.count": numbers + 1},
                **{"action": numbers % 5, "version": np.full(count, version)},
            },
            np.full(count, priority),
        )
        self.limiter.note_inserted(shard, writer.head)

    def take(self, version: int = 1) -> TransitionBatch:
        batch = self.source.take(version)
        assert batch is not None
        return batch
