"""The replay source: batches of transitions drawn from the shards of all actors, with everything counted on the way.

The learner waits until the limiter lets it draw, which an actor's append may do, and wakes actors by drawing.
Priorities go back after the losses; from a GPU they come one batch late, as nobody waits for them. If an actor dies,
its shard stays; if the learner dies, its successor finds shards, priorities and counts in shared memory and goes on.
"""

from __future__ import annotations

import collections
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echelon.config import ReplayConfig
from echelon.replay.layout import Block, ShardLayout
from echelon.replay.sampled import Keys, Sampled
from echelon.replay.sharded import Replay
from echelon.replay.snapshot import Snapshot
from echelon.roles.context import Station
from echelon.roles.replay_plan import ReplayPlan
from echelon.roles.source import Counters
from echelon.schema import TransitionBatch, Tree, space_leaves, unflatten

Array = np.ndarray[Any, Any]


class TransitionStaging:
    """One batch worth of memory on the CPU, page-locked where a GPU reads it."""

    def __init__(self, layout: ShardLayout, size: int, device: torch.device) -> None:
        self.device, self.tensors = device, dict[str, torch.Tensor]()
        fields = {f.name: (f.shape, f.dtype) for f in layout.fields} | {"weight": ((), np.dtype(np.float32))}
        for name, (shape, dtype) in fields.items():
            kind = torch.from_numpy(np.zeros(0, dtype)).dtype
            self.tensors[name] = torch.zeros((size, *shape), dtype=kind, pin_memory=device.type == "cuda")
        self.arrays: dict[str, Array] = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        # Frames are gathered where they are staged; rows are drawn whole and then parted into their fields.
        stacks = {f.name: self.arrays[f.name] for f in layout.fields if f.stack}
        self.block = Block(np.zeros(size, layout.row), stacks)
        self.rows = [f.name for f in layout.fields if not f.stack]
        self.keys: Keys
        self.copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until the device has read what was staged here before."""
        if self.copied is not None:
            self.copied.synchronize()

    def put(self, sampled: Sampled) -> None:
        """Takes in what was drawn into `block`."""
        for name in self.rows:
            self.arrays[name][...] = sampled.fields[name]
        self.arrays["weight"][...] = sampled.weights
        self.keys = sampled.keys

    def move(self) -> dict[str, torch.Tensor]:
        """The fields on the device: on a GPU by copies that go on while the caller does."""
        if self.copied is None:
            return self.tensors
        moved = {name: tensor.to(self.device, non_blocking=True) for name, tensor in self.tensors.items()}
        self.copied.record()
        return moved


class ReplaySource:
    """Batches of transitions, drawn as often as the limiter allows."""

    def __init__(self, plan: ReplayPlan, device: torch.device) -> None:
        config: ReplayConfig = plan.config.replay
        self.config, self.device, self.space = config, device, plan.context.spaces.observation
        self.batch_size, self.publish_every = config.batch, config.publish_every
        self.limiter, self.tally, self.snapshots = plan.limiter(), plan.tally(), plan.snapshots
        self.replay = Replay(plan.readers(), config.alpha if config.prioritized else 0.0)
        self.rng = np.random.default_rng((plan.config.seed, plan.context.epoch))
        self.beta = config.beta_start
        self.counters = Counters()
        self.fresh_lag: list[tuple[float, int]] = []  # lag mean and max of batches since the last report
        self.num_actors = plan.config.actor.num_actors
        self.seen = [self.tally.episodes_of(actor) for actor in range(self.num_actors)]
        self.paths = [leaf.path for leaf in space_leaves(self.space)]
        num_stagings = 1 if device.type == "cpu" else 2  # a GPU reads one while the next is filled
        layout = plan.layout
        self.stagings = collections.deque(
            TransitionStaging(layout, self.batch_size, device) for _ in range(num_stagings)
        )
        self.prefetched: TransitionBatch | None = None
        self.unread: tuple[Keys, torch.Tensor] | None = None  # priorities that a GPU may still be computing
        self.snapshot: Snapshot | None = None

    # Batches.

    def take(self, version: int) -> TransitionBatch | None:
        """The next batch for a learner at `version`, or None when the limiter does not allow it yet."""
        self._count_actors()
        if self.snapshot is not None and self.snapshot.step():
            self._keep_only(self.snapshot.path)
        self._give_back()
        batch, self.prefetched = self.prefetched, None
        return batch if batch is not None else self._fetch(version)

    def prefetch(self, version: int) -> None:
        """Fetches the batch for a learner at `version`, its next, while the device still learns from this one."""
        if self.prefetched is None and self.device.type != "cpu":
            self.prefetched = self._fetch(version)

    def _fetch(self, version: int) -> TransitionBatch | None:
        if not self.limiter.may_sample(self.batch_size):
            return None
        self.replay.advance()
        if self.replay.size < self.batch_size:
            return None
        staging = self.stagings[0]
        self.stagings.rotate()
        staging.wait()
        staging.put(self.replay.sample(self.batch_size, self.beta, self.rng, block=staging.block))
        self.limiter.note_sampled(0, self.batch_size)
        self._count_lag(version - staging.arrays["version"])
        fields = staging.move()
        return TransitionBatch(
            observation=self._tree(fields, ""),
            action=fields["action"],
            reward=fields["reward"],
            discount=fields["discount"],
            next_observation=self._tree(fields, "next_"),
            weight=fields["weight"],
            keys=staging.keys,
        )

    def _tree(self, fields: dict[str, torch.Tensor], prefix: str) -> Tree:
        return unflatten(self.space, iter([fields[prefix + path] for path in self.paths]))

    def listen(self) -> None:
        """Nothing is missed by looking: the limiter's words are looked at again before anybody sleeps."""

    def wait(self, station: Station, timeout_s: float) -> None:
        """Sleeps until a batch may be drawn, at most `timeout_s`."""
        start = time.perf_counter()
        self.limiter.wait_to_sample(self.batch_size, timeout_s)
        station.waited(start)

    def admit(self) -> None:
        """Opens the run to the actors, which go on from where the counters stand; once."""
        self.tally.open(self.counters.env_steps, self.counters.episodes)

    def schedule(self, progress: float) -> None:
        """Sets how far importance weights correct, in a run that is `progress` (0 to 1) done."""
        self.beta = self.config.beta_start + progress * (self.config.beta_end - self.config.beta_start)

    # Priorities.

    def acknowledge(self, keys: Keys, priorities: torch.Tensor) -> None:
        """Gives the transitions of a batch that was learned from their new priorities."""
        if self.replay.alpha == 0.0:
            return
        self.unread = (keys, priorities)
        if self.device.type == "cpu":
            self._give_back()

    def _give_back(self) -> None:
        if self.unread is None:
            return
        (keys, tensor), self.unread = self.unread, None
        priorities = tensor.cpu().numpy()  # a GPU has computed them long ago: the loss was looked at since
        self.replay.update(keys, priorities)
        self.tally.raise_top(float(priorities.max()))

    # What is counted.

    def _count_actors(self) -> None:
        counters, tally = self.counters, self.tally
        if not tally.is_open:
            return
        counters.env_steps, counters.episodes = tally.env_steps, tally.episodes
        for actor, seen in enumerate(self.seen):
            now = tally.episodes_of(actor)
            if now == seen:
                continue
            for value, length in tally.ended(actor, seen).tolist():
                counters.note_episode(value, int(length))
            self.seen[actor] = now

    def _count_lag(self, lag: Array) -> None:
        counters, lag_sum, lag_max = self.counters, float(lag.sum()), int(lag.max())
        counters.lag_sum += lag_sum
        counters.lag_steps += len(lag)
        counters.lag_max = max(counters.lag_max, lag_max)
        self.fresh_lag.append((lag_sum / len(lag), lag_max))

    def figures(self) -> dict[str, Any]:
        """How replay stands: transitions there, stored and drawn, and drawn for each that was stored."""
        self.replay.advance()
        inserted, sampled = self.limiter.inserted, self.limiter.sampled
        counted = inserted - self.config.min_size
        ratio = sampled / counted if counted > 0 else 0.0
        return {
            "size": self.replay.size,
            "inserted": inserted,
            "sampled": sampled,
            "samples_per_insert": ratio,
            "beta": self.beta,
        }

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.rng.bit_generator.state = state["rng"]

    def save(self, name: str) -> None:
        """Begins to write the replay's content as of now, unless that of an earlier checkpoint is still being written;
        goes on with every batch."""
        if self.snapshots is None or self.snapshot is not None:
            return
        path = self.snapshots / name
        shutil.rmtree(path, ignore_errors=True)
        self._give_back()
        self.replay.advance()
        self.snapshot = Snapshot(path, self.replay, self.limiter)

    def finish(self) -> None:
        """Writes what is left of a snapshot."""
        if self.snapshot is not None:
            self.snapshot.finish()
            self._keep_only(self.snapshot.path)

    def _keep_only(self, newest: Path) -> None:
        self.snapshot = None
        for path in newest.parent.iterdir():
            if path != newest:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Segments go with the session."""
