"""The replay source: draws batches of transitions from the shards of all actors and keeps the counters.

The learner waits until the limiter allows it to draw; an actor's append wakes it, and drawing wakes actors. From shards
of other hosts, `replay.prefetch` batches are in flight while it learns; they count as drawn. Priorities are written
back after the losses are computed; from a GPU they arrive one batch late, because the learner does not wait for them.
If an actor dies, its shard stays. If the learner dies, its successor continues with the shards, priorities and counts
in shared memory.
"""

from __future__ import annotations

import collections
import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from echelon.config import ReplayConfig
from echelon.errors import diverged
from echelon.replay.archive import Archive
from echelon.replay.layout import NothingLeft
from echelon.replay.reader import Seen
from echelon.replay.remote_wait import RemoteWait
from echelon.replay.sampled import Draft, Keys
from echelon.replay.sharded import Replay
from echelon.replay.sum_tree import MAX_PRIORITY
from echelon.roles.context import Station
from echelon.roles.loss_account import Reading
from echelon.roles.source import EndedEpisodes, Source
from echelon.roles.staging import BatchMemory, TransitionStaging, transition_fields
from echelon.roles.tally import UNKNOWN
from echelon.schema import TransitionBatch, Tree, space_leaves, unflatten

if TYPE_CHECKING:
    from echelon.roles.plan.replay import ReplayPlan

Array = np.ndarray[Any, Any]
REFRESH_TRIES = 10
FINISH_POLL_S = 0.1  # between two ticks while the final snapshot is written


class ReplaySource(Source):
    """Yields batches of transitions, as often as the limiter allows."""

    def __init__(self, plan: ReplayPlan, device: torch.device) -> None:
        super().__init__()
        config: ReplayConfig = plan.config.replay
        self.config, self.device, self.space = config, device, plan.context.spaces.observation
        self.batch_size, self.publish_every = config.batch, config.publish_every
        self.learner = plan.context.index
        # `wait` returns at this step: before the first update, nothing else bounds the actors. Those of an exact replay
        # stop by themselves.
        self.last_step = sys.maxsize if config.exact else plan.config.stop.steps or sys.maxsize
        side, self.tally = plan.learner_side(), plan.tally()
        self.limiter, self.links, self.inserted = side.limiter, side.links, side.limiter.inserted
        self.remote_wait = RemoteWait(side.links, side.limiter.listen(self.learner)) if side.links else None
        self.replay = Replay(side.readers, config.alpha if config.prioritized else 0.0)
        self.everything: Replay | Seen = self.replay  # all shards of the run, also those of other learners
        self.content, self.acknowledge = self, self._acknowledge if self.replay.alpha > 0.0 else None
        self.drafts = collections.deque[Draft]()
        self.is_short, self.short_news = False, list[str]()  # whether the shards cannot fill a batch, and its report
        self.num_ahead = config.prefetch if side.links else 0
        self.rng = np.random.default_rng((plan.config.seed, plan.context.generation))
        self.learning_rate = plan.config.optimizer.learning_rate
        self.prefetches = device.type != "cpu"
        self.seen = [self.tally.episodes_of(actor) for actor in range(plan.config.num_shards)]
        self.paths = [leaf.path for leaf in space_leaves(self.space)]
        on_cpu, layout = device.type == "cpu", plan.layout
        num_stagings = 1 if on_cpu else 2  # a GPU reads one while the other is filled
        self.stagings = collections.deque(
            TransitionStaging(layout, self.batch_size, device) for _ in range(num_stagings)
        )
        self.landing = None if on_cpu else BatchMemory(transition_fields(layout, self.batch_size), device)
        self.prefetched: TransitionBatch | None = None
        self.unread = collections.deque[tuple[Keys, Reading]]()  # priorities that a GPU may still be computing
        self.archive = Archive(plan.archive) if config.checkpoint else None
        self.waits_for_disk = plan.context.shares_process

    # Batches.

    def take(self, version: int) -> TransitionBatch | None:
        """Returns the next batch for a learner at `version`, or None if it is not ready or not allowed yet."""
        self._count_actors()
        batch, self.prefetched = self.prefetched, None
        if batch is not None:
            return batch
        self._update_priorities()
        return self._fetch(version)

    def prefetch(self, version: int) -> None:
        """Fetches the next batch, for a learner at `version`, while the device still learns from the current one."""
        if self.prefetched is None and self.prefetches:
            self._update_priorities(1)  # the newest belong to the current batch
            self.prefetched = self._fetch(version)

    def _fetch(self, version: int) -> TransitionBatch | None:
        self._draw()
        if not self.drafts or not self.drafts[0].is_ready():
            return None
        staging = self._next_staging()
        try:
            staging.put(self.replay.collect(self.drafts.popleft(), staging.block))
        except NothingLeft:  # the last host was just lost; the next `_draw` handles that
            self.stagings.rotate(-1)
            self.drafts.clear()
            return None
        return self._move(staging, version)

    def _next_staging(self) -> TransitionStaging:
        staging = self.stagings[0]
        self.stagings.rotate()
        staging.wait()
        return staging

    def _move(self, staging: TransitionStaging, version: int) -> TransitionBatch:
        """Moves the staged batch to the device, counts its lag and returns it."""
        self._count_lag(version - staging.arrays["version"][: len(staging.keys)])
        fields = staging.move(self.landing)
        return TransitionBatch(
            observation=self._tree(fields, ""),
            action=fields["action"],
            reward=fields["reward"],
            discount=fields["discount"],
            next_observation=self._tree(fields, "next_"),
            weight=fields["weight"],
            keys=staging.keys,
        )

    def _draw(self) -> None:
        """Draws the next batch and `num_ahead` further ones, as far as the limiter allows."""
        is_due = self.limiter.may_sample(self.batch_size)
        if self.links or is_due:  # messages of other hosts update the limiter's counts
            self.replay.advance()
        if self.replay.size < self.batch_size:
            self.drafts.clear()  # a host was lost, and the remaining items do not fill a batch
            if is_due:  # evaluated before `advance`, which has read all items counted by then: items are missing
                self._write_off()
            return
        self.is_short = False
        while len(self.drafts) <= self.num_ahead and self.limiter.may_sample(self.batch_size):
            self.limiter.note_sampled(self.learner, self.batch_size)
            self.drafts.append(self.replay.draw(self.batch_size, self.beta, self.rng))

    def _write_off(self) -> None:
        """Writes off the samples due for evicted items, so that actors may append although no batch can be filled.

        Reports the shortage once.
        """
        self.limiter.write_off(self.learner)
        rings = ", ".join(ring.name for ring in self.replay.layout.rings)
        if rings and not self.is_short and not any(self.replay.is_lost):  # a lost host is reported elsewhere
            self.short_news.append(
                f"replay: only {self.replay.size} of the {self.limiter.inserted:,} stored transitions are left, too "
                f"few for a batch of {self.batch_size}: consecutive stacks of {rings} share few frames, so frames are "
                "evicted before their transitions. Use --replay.frames whole, or raise replay.capacity."
            )
        self.is_short = True

    def _tree(self, fields: dict[str, torch.Tensor], prefix: str) -> Tree:
        return unflatten(self.space, iter([fields[prefix + path] for path in self.paths]))

    def listen(self) -> None:
        """Prepares a `wait` on other hosts. Without links this is not needed: the limiter checks before it sleeps."""
        if self.remote_wait is not None:
            self.remote_wait.listen()

    def wait(self, station: Station, timeout_s: float) -> None:
        """Sleeps until a batch may be drawn, for at most `timeout_s`."""
        start = time.perf_counter()
        if self.remote_wait is not None:
            self.remote_wait.wait(timeout_s)
        else:
            self.limiter.wait_for_items(lambda: self._may_draw() or self.tally.env_steps >= self.last_step, timeout_s)
        station.waited(start)

    def _may_draw(self) -> bool:
        """Returns whether the limiter allows a batch and the shards can fill it."""
        if not self.limiter.may_sample(self.batch_size):
            return False
        self.replay.advance()
        return self.replay.size >= self.batch_size

    def has_due_batch(self) -> bool:
        """Whether a batch is due, or may become due by a step that an actor has begun."""
        if not self.config.exact:
            return False
        is_drawn = self.prefetched is not None or bool(self.drafts)
        return is_drawn or not self.tally.all_rest or self.limiter.may_sample(self.batch_size)

    def admit(self) -> None:
        """Opens the run to the actors, with the current counters as its start. Only the first call has an effect."""
        self.tally.open(self.counters.env_steps, self.counters.episodes)

    @property
    def beta(self) -> float:
        """The exponent of the importance weights (0: no correction, 1: full correction)."""
        return self.config.beta_start + self.progress * (self.config.beta_end - self.config.beta_start)

    # Priorities.

    def _acknowledge(self, keys: Keys, priorities: torch.Tensor) -> None:
        """Queues the new priorities of a batch; on the CPU, applies them immediately."""
        if len(keys) == 0:
            return
        self.unread.append((keys, Reading(priorities)))
        if self.device.type == "cpu":
            self._update_priorities()

    def _update_priorities(self, keep: int = 0) -> None:
        """Applies the queued priorities of all batches except the newest `keep`."""
        while len(self.unread) > keep:
            keys, reading = self.unread.popleft()
            priorities = reading.read()
            top = float(priorities.max())
            if not top <= MAX_PRIORITY:  # max finds NaN, and no comparison with NaN is true
                what = f"the TD error of a transition became {top} ({self.counters.env_steps:,} steps)"
                raise diverged(what, self.learning_rate)
            self.replay.update(keys, priorities)
            self.tally.raise_top(top, self.learner)

    # Counts.

    def _count_actors(self) -> None:
        counters, tally = self.counters, self.tally
        if not tally.is_open:
            return
        counters.env_steps, counters.episodes = tally.env_steps, tally.episodes
        for actor, seen in enumerate(self.seen):
            now = tally.episodes_of(actor)
            if now == seen:
                continue
            returns, lengths, envs = tally.ended(actor, seen).T
            counters.note_episodes(returns.tolist(), lengths.astype(int).tolist())
            actors = np.full(len(returns), UNKNOWN if self.counts_episodes else actor)
            self.ended.append(EndedEpisodes(returns, lengths, actors, envs))
            self.seen[actor] = now

    def _count_lag(self, lag: Array) -> None:
        if len(lag) == 0:
            return
        counters, lag_sum, lag_max = self.counters, float(lag.sum()), int(lag.max())
        counters.lag_sum += lag_sum
        counters.lag_steps += len(lag)
        counters.lag_max = max(counters.lag_max, lag_max)
        self.fresh_lag.append((lag_sum / len(lag), lag_max))

    def refresh(self) -> None:
        for _ in range(REFRESH_TRIES):  # until no actor has added an item in between: the count is that of the items
            self.inserted = self.limiter.inserted
            self.replay.advance()
            if self.limiter.inserted == self.inserted:
                break
        self._count_actors()

    def figures(self) -> dict[str, Any]:
        """Returns the number of transitions present, inserted and sampled, and the samples per insert.

        Samples that were due for evicted transitions count as `written_off`, not as `sampled`.
        """
        inserted, sampled = self.inserted, self.limiter.sampled
        counted = inserted - self.config.min_size
        ratio = sampled / counted if counted > 0 else 0.0
        return {
            "size": self.everything.size,
            "inserted": inserted,
            "sampled": sampled,
            "written_off": self.limiter.written_off,
            "samples_per_insert": ratio,
            "beta": self.beta,
        }

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state, "top_priority": self.tally.known_top, "progress": self.progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.rng.bit_generator.state = state["rng"]
            span = self.config.beta_end - self.config.beta_start
            past = (state.get("beta", self.config.beta_start) - self.config.beta_start) / span if span else 0.0
            top, progress = state["top_priority"], state.get("progress", past)  # earlier versions saved beta instead
            if not 0.0 <= top < math.inf or not 0.0 <= progress <= 1.0:
                raise ValueError(f"source.top_priority={top} and source.progress={progress}")
            self.tally.raise_top(top, self.learner)
            self.progress = progress

    def repeat_from(self, updates: int) -> None:
        if self.config.exact and self.limiter.inserted:
            self.limiter.restart(self.learner, updates * self.batch_size)

    def save(self, name: str) -> None:
        """Starts to write a snapshot of the replay, unless an earlier snapshot is still being written.

        Waits until it is written if all roles share one process: such a run must not depend on the speed of the disk.
        """
        if self.archive is None:
            return
        self._update_priorities()
        self.archive.begin(name, self.everything, self.limiter)
        if self.waits_for_disk:
            self.finish(lambda: None)

    def finish(self, tick: Callable[[], None]) -> None:
        """Waits until the snapshot that `save` started is written; calls `tick` in the meantime."""
        while self.archive is not None and not self.archive.wait(FINISH_POLL_S):
            tick()

    def news(self) -> list[str]:
        news, self.replay.lost, self.short_news = self.replay.lost + self.short_news, [], []
        return news

    def disk_error(self) -> str | None:
        return None if self.archive is None or self.archive.is_writing else self.archive.error

    def close(self) -> None:
        """Closes the links; the shared memory is removed with the session."""
        for link in self.links:
            link.close()
