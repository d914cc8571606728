"""How replay fits into a run: its items, its limiter, its memory, alike in every process."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path

import numpy as np

from echelon.config import TrainConfig
from echelon.errors import ConfigError
from echelon.layout import Leaf
from echelon.replay.layout import ShardLayout, check_room, item_layout
from echelon.replay.limiter import Limiter, LimiterRule
from echelon.replay.reader import PriorityColumn, ShardReader
from echelon.replay.shard import Shard
from echelon.replay.snapshot import restore
from echelon.roles.context import Context
from echelon.roles.tally import Tally
from echelon.runs.checkpoint import latest_checkpoint
from echelon.schema import Spaces, action_leaf, space_leaves

SNAPSHOT = re.compile(r"step_(\d{12,})")


def stack_leaves(config: TrainConfig, spaces: Spaces) -> list[Leaf]:
    """The leaves of an observation that are stacks of images over their first axis."""
    frames = config.replay.frames
    if frames == "whole" or (frames == "auto" and not str(config.env.id).startswith("ALE/")):
        return []
    leaves = space_leaves(spaces.observation)
    found = [leaf for leaf in leaves if leaf.dtype == np.uint8 and len(leaf.shape) >= 3]
    if not found and frames == "stacked":
        shapes = ", ".join(f"{leaf.path} {leaf.shape} of {leaf.dtype}" for leaf in leaves)
        raise ConfigError(
            f"replay.frames=stacked, but no observation is a stack of uint8 images (frames, height, width): {shapes}. "
            "Use --replay.frames whole, or stack frames in the environment."
        )
    return found


def transition_layout(config: TrainConfig, spaces: Spaces) -> ShardLayout:
    """The items of one actor's shard."""
    action, leaves = action_leaf(spaces.action), space_leaves(spaces.observation)
    fields = {leaf.path: (leaf.shape, leaf.dtype) for leaf in leaves}
    fields |= {f"next_{leaf.path}": (leaf.shape, leaf.dtype) for leaf in leaves}
    fields |= {"action": (action.shape, action.dtype), "version": ((), np.dtype(np.int64))}
    fields |= {name: ((), np.dtype(np.float32)) for name in ("reward", "discount")}
    stacks = {name: leaf.path for leaf in stack_leaves(config, spaces) for name in (leaf.path, f"next_{leaf.path}")}
    return item_layout(fields, _shard_capacity(config), stacks)


def _shard_capacity(config: TrainConfig) -> int:
    replay, actors = config.replay, config.actor.num_actors
    capacity, least = replay.capacity // actors, max(replay.batch, _chunk(config))
    if capacity < least:
        raise ConfigError(
            f"replay.capacity={replay.capacity} gives each of {actors} actors a shard of {capacity} transitions, but "
            f"one must hold a batch and what an actor stores at once: {least}. Raise it to {least * actors} or more."
        )
    return capacity


def _chunk(config: TrainConfig) -> int:
    """The most transitions that an actor stores between two looks at the limiter: those of a trajectory's steps, and
    those that were open before it and end in it."""
    return config.actor.envs * (config.actor.trajectory + config.replay.n_step - 1)


def limiter_rule(config: TrainConfig) -> LimiterRule:
    replay, actors = config.replay, config.actor.num_actors
    return LimiterRule(
        samples_per_insert=replay.samples_per_insert,
        min_size=replay.min_size,
        capacity=_shard_capacity(config) * actors,
        batch=replay.batch,
        chunk=_chunk(config),
        num_shards=actors,
    )


class ReplayPlan:
    """The shards, the limiter and the tally of a run: one shard for each actor."""

    def __init__(self, context: Context) -> None:
        self.context, self.config = context, context.train
        self.folder = context.session

    @cached_property
    def layout(self) -> ShardLayout:
        return transition_layout(self.config, self.context.spaces)

    @cached_property
    def rule(self) -> LimiterRule:
        return limiter_rule(self.config)

    @property
    def nbytes(self) -> int:
        """What replay needs in shared memory."""
        actors = self.config.actor.num_actors
        shard = self.layout.nbytes + PriorityColumn.size(self.layout.capacity)
        return actors * shard + Limiter.size(self.rule) + Tally.size(actors)

    def shard(self, index: int) -> Shard:
        return Shard.at(self.folder, index, self.layout)

    def readers(self) -> list[ShardReader]:
        return [ShardReader.at(self.folder, i, self.layout) for i in range(self.config.actor.num_actors)]

    def limiter(self) -> Limiter:
        return Limiter.at(self.folder, self.rule)

    def tally(self) -> Tally:
        return Tally.at(self.folder, self.config.actor.num_actors)

    @property
    def snapshots(self) -> Path | None:
        """Where the content of the replay is kept, if it is part of the checkpoints."""
        return self.context.run_dir / "replay" if self.config.replay.checkpoint else None

    def check(self) -> None:
        """Refuses a replay that does not fit, before anything is made."""
        check_room(self.nbytes, f"replay.capacity={self.config.replay.capacity}", self.folder)

    def make(self) -> None:
        """Makes the memory; a run that is gone on with gets back what its newest snapshot holds."""
        readers, limiter = self.readers(), self.limiter()
        self.tally()
        path = self._newest_snapshot() if self.context.epoch else None
        if path is not None:
            restore(path, readers, limiter)

    def _newest_snapshot(self) -> Path | None:
        """The newest snapshot that is no younger than the newest checkpoint."""
        checkpoint = latest_checkpoint(self.context.run_dir / "checkpoints")
        if self.snapshots is None or checkpoint is None or not self.snapshots.is_dir():
            return None
        found = [path for path in self.snapshots.iterdir() if SNAPSHOT.fullmatch(path.name)]
        return max((path for path in found if path.name <= checkpoint.name), key=lambda path: path.name, default=None)
