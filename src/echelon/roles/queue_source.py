"""The queue source: takes slots from the ring, in the order that the lag bound requires, and joins them to a batch.

The learner waits on `ready`, which actors ring when they commit. Slots are copied and released immediately. New slots
are admitted only when the weights learned from these are published (`admit`), which bounds the lag. If an actor dies,
its unread slots stay readable. If it stalls, its slots that arrive too late are dropped and counted.
"""

from __future__ import annotations

import collections
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from echelon.config import TrainConfig
from echelon.errors import DivergedError
from echelon.roles.context import Station
from echelon.roles.source import EndedEpisodes, Offer, SharedSource
from echelon.roles.staging import BatchMemory, FieldPlan
from echelon.schema import Batch, TrajectorySchema, unflatten
from echelon.transport.shared_memory import SlotRing

Array = np.ndarray[Any, Any]
BATCH_FIELDS = ("first", "action", "log_prob", "reward", "terminated", "truncated", "valid")


class Staged(Protocol):
    """Memory in which one batch is assembled."""

    @property
    def batch(self) -> Any:
        """The batch; valid after `move`."""

    def put(self, position: int, stream: int, views: dict[str, Array]) -> None:
        """Copies one slot of `stream` into position `position` of the batch."""

    def check(self) -> None:
        """Raises DivergedError if the batch contains NaN or infinity."""

    def wait(self) -> None:
        """Waits until the device has read the previous batch from this memory."""

    def move(self) -> None:
        """Copies the batch to the device."""


S = TypeVar("S", bound=Staged)


class RingSource(SharedSource, Generic[S]):
    """Yields batches of slots; subclasses define the content of a slot and count it."""

    def __init__(self, config: TrainConfig, ring: SlotRing, device: torch.device) -> None:
        super().__init__()
        self.ring, self.device = ring, device
        self.max_lag = config.learner.max_lag
        self.batch_size = config.batch_trajectories // config.learner.num_learners
        self.window = ring.num_slots
        self.prefetches = device.type != "cpu" and self.max_lag != 0
        num_stagings = 1 if device.type == "cpu" else 2  # a GPU reads one while the other is filled
        self.stagings = collections.deque(self._make_staging() for _ in range(num_stagings))
        self.next_stream = 0
        self.prefetched: S | None = None
        self.held: S | None = None  # offered to the other learners, not yet taken
        self.patience_s = config.learner.patience_s
        self.short_since: float | None = None  # since when the other actors could fill a batch without the slowest one
        self.ahead = [0] * ring.num_streams  # slots of each stream in the prefetched batch

    @abstractmethod
    def _make_staging(self) -> S:
        """Returns memory for one batch."""

    @abstractmethod
    def _count(self, staging: S, version: int) -> None:
        """Counts the steps, episodes and lag of a batch for a learner at `version`."""

    def take(self, version: int) -> Any | None:
        staging = self._counted(version)
        return None if staging is None else staging.batch

    def offer(self, version: int) -> Offer:
        """Offers its part of the next batch, if it is ready, and holds it until the other learners have theirs."""
        self.held = self.held or self._counted(version)
        return Offer(self.held is not None)

    def take_part(self, version: int, offers: Sequence[Offer]) -> Any | None:
        del version  # the part was counted when it was offered
        if self.held is None or not all(offer.is_ready for offer in offers):
            return None
        staging, self.held = self.held, None
        return staging.batch

    def _counted(self, version: int) -> S | None:
        """Returns the next batch, after counting it, or None if it is not ready."""
        staging, self.prefetched = self.prefetched, None
        if staging is not None:
            self.ahead = [0] * self.ring.num_streams
        else:
            if self._drop_late(version):
                self.admit()
            staging = self._fetch()
        if staging is not None:
            self._count(staging, version)
        return staging

    def prefetch(self, version: int) -> None:
        """Fetches the next batch, for a learner at `version`, while the device still learns from the current one."""
        if self.prefetched is not None or not self.prefetches:
            return
        self._drop_late(version)
        self.prefetched = self._fetch(self.ahead if self.max_lag is not None else None)

    def listen(self) -> None:
        self.ring.ready.clear()

    def wait(self, station: Station, timeout_s: float) -> None:
        station.wait(timeout_s, [self.ring.ready.descriptor])

    def close(self) -> None:
        self.ring.close()

    def _fetch(self, ahead: list[int] | None = None) -> S | None:
        """Copies the next batch out of the ring. Adds the prefetched slots of each stream to `ahead`, if given."""
        streams = self._choose()
        if streams is None:
            return None
        if ahead is not None:
            for stream in streams:
                ahead[stream] += 1
        staging = self.stagings[0]
        self.stagings.rotate()
        staging.wait()
        for position, stream in enumerate(streams):
            staging.put(position, stream, self.ring.readable(stream))
            self.ring.release(stream)
        if self.max_lag is None:
            self.admit()
        staging.check()
        staging.move()
        return staging

    def admit(self) -> None:
        """Lets every actor run `window` slots ahead of the learner, and wakes the actors that may continue."""
        for stream in range(self.ring.num_streams):
            self.ring.grant(stream, self.window - self.ahead[stream])

    def _is_late(self, slot: dict[str, Array], version: int) -> bool:
        """Returns whether `slot` is too old for a learner at `version`."""
        return self.max_lag is not None and bool(version - slot["version"][0] > self.max_lag)

    def _drop_late(self, version: int) -> int:
        """Drops slots beyond the lag bound and returns their number."""
        late = 0
        for stream in range(self.ring.num_streams):
            while self.ring.num_ready(stream) and self._is_late(self.ring.readable(stream), version):
                self.ring.release(stream)
                late += 1
        self.counters.dropped += late
        return late

    def _choose(self) -> list[int] | None:
        """Returns the stream for each position of the batch, or None if too few slots are ready.

        If the lag is bounded, every actor contributes an equal share, in the order of the actors. No actor then
        overtakes another and no slot is late. The others continue without an actor only if it has stalled and the bound
        is above 0. If the lag is not bounded, ready streams are taken round robin.
        """
        num_streams = self.ring.num_streams
        ready = [self.ring.num_ready(stream) for stream in range(num_streams)]
        if self.max_lag is not None:
            share = self.batch_size // num_streams
            if min(ready) >= share:
                self.short_since = None
                return [s for s in range(num_streams) for _ in range(share)]
            if self.max_lag == 0 or not self._has_stalled(sum(ready) >= self.batch_size):
                return None
        if sum(ready) < self.batch_size:
            return None
        chosen: list[int] = []
        while len(chosen) < self.batch_size:
            if ready[self.next_stream]:
                ready[self.next_stream] -= 1
                chosen.append(self.next_stream)
            self.next_stream = (self.next_stream + 1) % num_streams
        return chosen

    def _has_stalled(self, others_ready: bool) -> bool:
        """Returns whether the other actors have been ready for longer than `patience_s` without the slowest one."""
        if not others_ready:
            self.short_since = None
            return False
        now = time.monotonic()
        self.short_since = self.short_since or now
        return now - self.short_since > self.patience_s

    def _count_lag(self, lag: Array, weights: Array) -> None:
        """Counts steps and their lag; `weights` holds the number of steps for each entry of `lag`."""
        counters, steps = self.counters, int(weights.sum())
        lag_sum, lag_max = float((lag * weights).sum()), int(lag.max())
        counters.env_steps += steps
        counters.lag_sum += lag_sum
        counters.lag_steps += steps
        counters.lag_max = max(counters.lag_max, lag_max)
        self.fresh_lag.append((lag_sum / max(steps, 1), lag_max))


def trajectory_fields(schema: TrajectorySchema, trajectories: int) -> FieldPlan:
    """Returns the fields of a batch of `trajectories`, whose lanes are joined."""
    plan: FieldPlan = []
    for entry in schema.fields:
        axis = 0 if entry.name.startswith("state.") else 1
        columns = trajectories if entry.name == "version" else trajectories * schema.num_envs
        rest = () if entry.name == "version" else entry.shape[axis + 1 :]
        plan.append((entry.name, (*entry.shape[:axis], columns, *rest), entry.dtype))
    return plan


class Staging:
    """CPU memory for one batch of trajectories, pinned if the learner uses a GPU, and the batch on the device.

    All batches of a GPU are in the memory `landing`: a recorded graph finds them there. The device copies a batch into
    it after all work queued before, so the previous batch has been learned from by then.
    """

    def __init__(
        self,
        schema: TrajectorySchema,
        trajectories: int,
        device: torch.device,
        first: int = 0,
        landing: BatchMemory | None = None,
        start: tuple[int, int] | None = None,
    ) -> None:
        """`first` is the index of the actor of the first stream.

        `start` is the seed and the generation of the run, if known: errors then name the seed of an environment.
        """
        self.start = start
        self.schema, self.num_envs, self.first = schema, schema.num_envs, first
        plan, is_cuda = trajectory_fields(schema, trajectories), device.type == "cuda"
        self.memory = BatchMemory(plan, torch.device("cpu"), pinned=is_cuda)
        self.arrays: dict[str, Array] = {name: tensor.numpy() for name, tensor in self.memory.tensors.items()}
        self.lanes = torch.zeros(trajectories * schema.num_envs, dtype=torch.int64)
        self.landing = landing or (BatchMemory(plan, device) if is_cuda else self.memory)
        self.copied: torch.cuda.Event | None = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        self.batch = self._make_batch(self.landing.tensors)

    def put(self, position: int, stream: int, views: dict[str, Array]) -> None:
        """Copies one slot into the lanes at `position`."""
        lanes = slice(position * self.num_envs, (position + 1) * self.num_envs)
        for name, array in self.arrays.items():
            if name == "version":
                array[:, position] = views[name]
            elif name.startswith("state."):
                array[lanes] = views[name]
            else:
                array[:, lanes] = views[name]
        self.place(position, stream)

    def place(self, position: int, stream: int) -> None:
        """Records the environments of the lanes at `position`: those of the actor of `stream`."""
        lanes = slice(position * self.num_envs, (position + 1) * self.num_envs)
        actor = self.first + stream
        self.lanes[lanes] = torch.arange(actor * self.num_envs, (actor + 1) * self.num_envs)

    def check(self) -> None:
        """Raises DivergedError if a reward or an observation is NaN or infinite."""
        for name in ("reward", *self.schema.observation_names):
            array = self.arrays[name]
            with np.errstate(over="ignore", invalid="ignore"):  # fast check by one sum, which may itself overflow
                if not np.issubdtype(array.dtype, np.floating) or np.isfinite(array.sum()):
                    continue
            bad = np.argwhere(~np.isfinite(array))
            if len(bad):
                row, column = int(bad[0][0]), int(bad[0][1])
                actor, env = divmod(int(self.lanes[column]), self.num_envs)
                rows = row + (name == "reward")  # observation 0 is that before the first step
                step = int(self.arrays["valid"][:rows, column].sum())  # without resets
                raise DivergedError(
                    f"{name}{bad[0][2:].tolist() or ''} is {array[tuple(bad[0])]} at step {step} of a trajectory of "
                    f"actor {actor}, environment {env}{self._seed(actor, env)}. The environment must return finite "
                    "numbers: check it, or wrap it to clip them."
                )

    def _seed(self, actor: int, env: int) -> str:
        """Returns the seed that an environment started with, for an error; "" if it is not known."""
        from echelon.envs.make import actor_start, env_seeds

        if self.start is None:
            return ""
        seed, generation = self.start
        seeds = env_seeds(seed, actor, actor_start(generation), self.num_envs + 1)
        return f" (seed {seeds[env]} unless restarted)"

    def wait(self) -> None:
        """Waits until the device has read the previous batch from this memory."""
        if self.copied is not None:
            self.copied.synchronize()

    def move(self) -> None:
        """Copies the batch to the device; the copy to a GPU is asynchronous."""
        if self.copied is not None:
            self.landing.memory.copy_(self.memory.memory, non_blocking=True)
            self.copied.record()

    def _make_batch(self, tensors: dict[str, torch.Tensor]) -> Batch:
        schema = self.schema
        observation = unflatten(schema.spaces.observation, iter([tensors[n] for n in schema.observation_names]))
        state = tuple(tensors[f"state.{i}"] for i in range(len(schema.state_shapes)))
        rest = {name: tensors[name] for name in BATCH_FIELDS}
        return Batch(observation, **rest, state=state, lanes=self.lanes)


class QueueSource(RingSource[Staging]):
    """Yields batches of trajectories in the order that the lag bound requires."""

    def __init__(
        self,
        config: TrainConfig,
        schema: TrajectorySchema,
        ring: SlotRing,
        device: torch.device,
        learner: int = 0,
        generation: int = 0,
    ) -> None:
        self.start = config.seed, generation
        self.schema, self.first = schema, config.actors_of(learner).start
        self.landing: BatchMemory | None = None  # of a GPU; shared by all stagings
        super().__init__(config, ring, device)

    def _make_staging(self) -> Staging:
        staging = Staging(self.schema, self.batch_size, self.device, self.first, self.landing, self.start)
        self.landing = staging.landing if self.device.type == "cuda" else None
        return staging

    def _count(self, staging: Staging, version: int) -> None:
        counters, arrays = self.counters, staging.arrays
        lag, valid = version - arrays["version"], arrays["valid"]
        self._count_lag(lag, valid.reshape(*lag.shape, -1).sum(-1))  # valid steps per row of each trajectory
        length = arrays["episode_length"]
        ended = length.nonzero()
        counters.episodes += len(ended[0])
        if len(ended[0]):
            returns, lengths = arrays["episode_return"][ended], length[ended]
            counters.note_episodes(returns.tolist(), lengths.tolist())
            lanes = staging.lanes.numpy()[ended[1]]
            self.ended.append(EndedEpisodes(returns, lengths, *np.divmod(lanes, staging.num_envs)))
