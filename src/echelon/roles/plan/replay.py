"""The parts of a run with replay, the same in every process: its items, its limiter and its memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from echelon.config import TrainConfig
from echelon.errors import ConfigError
from echelon.hosts.run_steps import RunSteps
from echelon.memory_check import check_fits, free_memory
from echelon.replay.archive import Archive
from echelon.replay.layout import ShardLayout, item_layout
from echelon.replay.limiter import Limiter, LimiterRule
from echelon.replay.reader import PriorityColumn, Reader, ShardReader
from echelon.replay.remote import Link
from echelon.replay.restore import DamagedSnapshot, restore
from echelon.replay.shard import Shard
from echelon.replay.sharded import Replay
from echelon.replay.snapshot import most_bytes
from echelon.replay.wire import ReplayWire
from echelon.roles.context import Context
from echelon.roles.frame_stacks import stack_leaves
from echelon.roles.tally import Tally
from echelon.schema import Spaces, action_leaf, space_leaves

ARRIVAL_S = 60.0  # how long a learner waits for a shard server that is starting


def transition_layout(config: TrainConfig, spaces: Spaces) -> ShardLayout:
    """Returns the layout of one actor's shard."""
    action, leaves = action_leaf(spaces.action), space_leaves(spaces.observation)
    fields = {leaf.path: (leaf.shape, leaf.dtype) for leaf in leaves}
    fields |= {f"next_{leaf.path}": (leaf.shape, leaf.dtype) for leaf in leaves}
    fields |= {"action": (action.shape, action.dtype), "version": ((), np.dtype(np.int64))}
    fields |= {name: ((), np.dtype(np.float32)) for name in ("reward", "discount")}
    stacks = {name: leaf.path for leaf in stack_leaves(config, spaces) for name in (leaf.path, f"next_{leaf.path}")}
    layout = item_layout(fields, _shard_capacity(config), stacks)
    _check_frames(config, layout)
    return layout


def _check_frames(config: TrainConfig, layout: ShardLayout) -> None:
    """Raises ConfigError if the side rings cannot hold the frames of `replay.min_size` transitions.

    Assumes the best case, in which each step adds one new frame to its stack.
    """
    replay, envs = config.replay, 1 if config.has_workers else config.actor.envs_per_actor
    depths = {f.ring: f.stack for f in layout.fields if f.stack}
    for ring in layout.rings:
        # In every environment the newest transition began n steps ago, and the oldest needs the earlier frames of its
        # first stack.
        room = config.num_shards * (ring.capacity - envs * (depths[ring.name] - 1 + replay.n_step))
        if room < replay.min_size:
            raise ConfigError(
                f"replay.capacity={replay.capacity} holds the frames of {ring.name} for at most {max(room, 0)} "
                f"transitions ({envs} environments, stacks of {depths[ring.name]} frames, {replay.n_step} steps per "
                f"transition), fewer than replay.min_size={replay.min_size}. Raise replay.capacity, lower min_size, or "
                "use --replay.frames whole."
            )


def _shard_capacity(config: TrainConfig) -> int:
    replay, shards = config.replay, config.num_shards
    capacity, least = replay.capacity // shards, max(replay.batch, _chunk(config))
    if capacity < least:
        raise ConfigError(
            f"replay.capacity={replay.capacity} gives each of {shards} shards {capacity} transitions, but a shard must "
            f"hold a batch and the largest append, so at least {least}. Raise it to {least * shards} or more."
        )
    return capacity


def _chunk(config: TrainConfig) -> int:
    """Returns the most transitions that an actor stores between two checks of the limiter.

    These are the transitions of all steps of a trajectory, plus those that began before it and end in it. The gateway
    stores a whole piece of an episode.
    """
    if config.has_workers:
        return config.workers.max_steps
    return config.actor.envs_per_actor * (config.actor.trajectory + config.replay.n_step - 1)


def limiter_rule(config: TrainConfig) -> LimiterRule:
    replay, shards = config.replay, config.num_shards
    rule = LimiterRule(
        samples_per_insert=0.0 if config.has_workers else replay.samples_per_insert,  # workers: updates per episode
        min_size=replay.min_size,
        capacity=_shard_capacity(config) * shards,
        batch=replay.batch,
        chunk=_chunk(config),
        num_shards=shards,
        exact=replay.exact,
    )
    if config.learner.num_learners == 1:
        return rule
    # All learners together draw one batch, so the tolerance is that of one learner.
    return replace(rule, num_learners=config.learner.num_learners, tolerance=rule.room)


@dataclass(frozen=True, slots=True)
class LearnerSide:
    """A learner's access to the replay."""

    limiter: Limiter
    readers: list[Reader]
    links: list[Link] = field(default_factory=list)  # to hosts whose shards are not in shared memory


class ReplayPlan:
    """The shards, the limiter and the tally of a run: one shard for each actor, or one for the gateway."""

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
        """The bytes of shared memory that replay needs."""
        shards = self.config.num_shards
        shard = self.layout.nbytes + PriorityColumn.size(self.layout.capacity)
        limiters = 1 if self.learner_folder == self.folder else 2
        tally = Tally.size(shards, self.config.learner.num_learners)
        return shards * shard + limiters * Limiter.size(self.rule) + tally

    def shard(self, index: int) -> Shard:
        return Shard.at(self.folder, index, self.layout)

    def limiter(self) -> Limiter:
        """Opens the limiter of the actors' host."""
        return Limiter.at(self.folder, self.rule)

    @property
    def learner_folder(self) -> Path:
        """The folder of the learner's shared memory. With TCP it is separate from the actors', even on one host."""
        return self.folder / "learner" if self.config.replay.transport == "tcp" else self.folder

    def readers(self) -> list[ShardReader]:
        """Returns readers of all shards in shared memory."""
        columns = self.columns()
        return [ShardReader(self.shard(index), column) for index, column in enumerate(columns)]

    def shards_of(self, learner: int) -> range:
        """Returns the shards that a learner draws from: those of its actors."""
        is_one = self.config.learner.num_learners == 1
        return range(self.config.num_shards) if is_one else self.config.actors_of(learner)

    def columns(self) -> list[PriorityColumn]:
        capacity = self.layout.capacity
        return [PriorityColumn.at(self.learner_folder, index, capacity) for index in range(self.config.num_shards)]

    @property
    def server_file(self) -> Path:
        """The file in which the shard server writes its address."""
        return self.folder / "shards-0.address"

    @property
    def wire(self) -> ReplayWire:
        return ReplayWire(self.layout, range(self.config.num_shards), self.rule)

    def learner_side(self) -> LearnerSide:
        """Returns the learner's access to the shards by the configured transport; with TCP, waits for the server."""
        limiter = Limiter.at(self.learner_folder, self.rule)
        if self.config.replay.transport == "shm":
            readers = self.readers()
            return LearnerSide(limiter, [readers[shard] for shard in self.shards_of(self.context.index)])
        deadline = time.monotonic() + ARRIVAL_S
        while not self.server_file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        config = self.config.replay
        address = self.server_file.read_text() if self.server_file.exists() else config.address
        link = Link(address, self.wire, self.columns(), limiter, config.lost_after_s)
        link.arrive(max(1.0, deadline - time.monotonic()))
        return LearnerSide(limiter, list(link.readers), [link])

    def tally(self) -> Tally:
        return Tally.at(self.folder, self.config.num_shards, self.config.learner.num_learners)

    def tally_steps(self) -> Callable[[], int]:
        """Returns a function that returns the environment steps of the run so far, as this host knows them."""
        if not self.context.is_at_head:
            return RunSteps(self.folder).get
        tally = self.tally()
        return lambda: tally.env_steps

    @property
    def archive(self) -> Path:
        """The folder of the replay snapshots, if they are part of the checkpoints."""
        return self.context.run_dir / "replay"

    def check(self) -> None:
        """Raises ConfigError if the replay does not fit into memory or on disk, before anything is created."""
        what, shards = f"replay.capacity={self.config.replay.capacity}", self.config.num_shards
        check_fits(self.nbytes, what, free_memory(self.folder))
        check_fits(Replay.size_of(self.layout, shards), what, free_memory())  # the learner's sum tree
        if self.config.replay.checkpoint:
            Archive(self.archive).check_fits(most_bytes(self.layout, shards))

    @property
    def _index_bounds(self) -> dict[str, tuple[Any, Any]]:
        """The smallest and the largest value of the fields that algorithms index with."""
        from echelon.roles.intake import action_bounds  # which imports this module

        spaces, is_users = self.context.spaces, self.config.algorithm.is_users
        bounds = action_bounds(spaces.action, as_env=is_users) if action_leaf(spaces.action).dtype.kind == "i" else None
        return {"action": bounds} if bounds is not None else {}

    def make(self) -> list[str]:
        """Creates the shared memory; a resumed run restores its newest intact snapshot. Returns messages for the user.

        If no snapshot is intact, the replay starts empty, because the run may be resumed unattended. Raises ConfigError
        if a snapshot has another layout, because then the user has just changed the configuration.
        """
        self.learner_folder.mkdir(exist_ok=True)
        readers, limiter = self.readers(), self.limiter()
        self.tally()
        if not self.context.generation or not self.config.replay.checkpoint:
            return []
        news = []
        for path in Archive(self.archive).newest_first():
            try:
                restore(path, readers, limiter, self._index_bounds)
            except DamagedSnapshot as error:
                news.append(str(error))
            except ConfigError as error:
                raise ConfigError(
                    f"{error} Resume with the actors, spaces and replay.capacity with which it was written, or remove "
                    f"{self.archive} to continue with an empty replay."
                ) from error
            else:
                size = sum(stop - start for start, stop in (reader.window() for reader in readers))
                return [*news, f"replay: restored the {size:,} transitions of {path.name}"]
        return [*news, "replay: starts empty, as there is no intact snapshot"]
