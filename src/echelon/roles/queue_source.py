"""The queue source: slots of the ring, taken in the order that the lag bound asks for and laid side by side in a batch.

The learner waits on `ready`, which actors ring when they commit. Slots are copied and released at once; admission of
new ones follows when the weights learned from them are published (`admit`), which is what bounds the lag. If an actor
dies, its unread slots stay readable; if it stalls, what it brings too late is dropped and counted.
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
from echelon.roles.source import Offer, SharedSource
from echelon.schema import Batch, TrajectorySchema, unflatten
from echelon.transport.shared_memory import SlotRing

Array = np.ndarray[Any, Any]
BATCH_FIELDS = ("first", "action", "log_prob", "reward", "terminated", "truncated", "valid")


class Staged(Protocol):
    """Memory that one batch is made in."""

    @property
    def batch(self) -> Any:
        """What the learner learns from, once it has moved."""

    def put(self, position: int, stream: int, views: dict[str, Array]) -> None:
        """Copies one slot of `stream` into its position of the batch."""

    def check(self) -> None:
        """Refuses NaN and infinity before anything learns from them."""

    def wait(self) -> None:
        """Until the device has read what was staged here before."""

    def move(self) -> None:
        """Makes the batch, on the device."""


S = TypeVar("S", bound=Staged)


class RingSource(SharedSource, Generic[S]):
    """Batches of slots; subclasses say what lies in one, and count it."""

    def __init__(self, config: TrainConfig, ring: SlotRing, device: torch.device) -> None:
        super().__init__()
        self.ring, self.device = ring, device
        self.max_lag = config.learner.max_lag
        self.batch_size = config.batch_trajectories // config.learner.num_learners
        self.window = ring.num_slots
        self.prefetches = device.type != "cpu" and self.max_lag != 0
        num_stagings = 1 if device.type == "cpu" else 2  # a GPU reads one while the next is filled
        self.stagings = collections.deque(self._make_staging() for _ in range(num_stagings))
        self.next_stream = 0
        self.prefetched: S | None = None
        self.held: S | None = None  # offered to other learners
        self.patience_s = config.learner.patience_s
        self.short_since: float | None = None  # since when a batch could be filled without the slowest actor
        self.ahead = [0] * ring.num_streams  # slots of each stream in the prefetched batch

    @abstractmethod
    def _make_staging(self) -> S:
        """Memory for one batch."""

    @abstractmethod
    def _count(self, staging: S, version: int) -> None:
        """Counts a batch that a learner at `version` learns from."""

    def take(self, version: int) -> Any | None:
        staging = self._counted(version)
        return None if staging is None else staging.batch

    def offer(self, version: int) -> Offer:
        """Whether its part of the next batch is there; it is held until the others have theirs."""
        self.held = self.held or self._counted(version)
        return Offer(self.held is not None)

    def take_part(self, version: int, offers: Sequence[Offer]) -> Any | None:
        del version  # by which it was counted when it was offered
        if self.held is None or not all(offer.is_ready for offer in offers):
            return None
        staging, self.held = self.held, None
        return staging.batch

    def _counted(self, version: int) -> S | None:
        """The next batch, counted."""
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
        """Fetches the batch for a learner at `version`, its next, while the device still learns from this one."""
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
        """Copies the next batch out of the ring; `ahead` counts what was taken from each stream before its turn."""
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
        """Lets every actor run a window ahead of what was learned from; rings those that may go on."""
        for stream in range(self.ring.num_streams):
            self.ring.grant(stream, self.window - self.ahead[stream])

    def _is_late(self, slot: dict[str, Array], version: int) -> bool:
        """Whether a learner at `version` gives up what lies in `slot`."""
        return self.max_lag is not None and bool(version - slot["version"][0] > self.max_lag)

    def _drop_late(self, version: int) -> int:
        """Gives up what lags beyond the bound; returns how many slots that were."""
        late = 0
        for stream in range(self.ring.num_streams):
            while self.ring.num_ready(stream) and self._is_late(self.ring.readable(stream), version):
                self.ring.release(stream)
                late += 1
        self.counters.dropped += late
        return late

    def _choose(self) -> list[int] | None:
        """Which stream fills each position of the batch; None if too few are ready.

        With a bound on the lag every actor brings the same share, in the order of the actors: then nobody overtakes
        anybody, and nothing comes late. Only when one has stalled, and the bound allows it, do the others go on without
        it. Without a bound it is whoever is ready, in turns.
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
        """Whether the others have been ready without the slowest for longer than it may take its time."""
        if not others_ready:
            self.short_since = None
            return False
        now = time.monotonic()
        self.short_since = self.short_since or now
        return now - self.short_since > self.patience_s

    def _count_lag(self, lag: Array, weights: Array) -> None:
        """`weights` says how many steps lag by each of `lag`."""
        counters, steps = self.counters, int(weights.sum())
        lag_sum, lag_max = float((lag * weights).sum()), int(lag.max())
        counters.env_steps += steps
        counters.lag_sum += lag_sum
        counters.lag_steps += steps
        counters.lag_max = max(counters.lag_max, lag_max)
        self.fresh_lag.append((lag_sum / max(steps, 1), lag_max))


class Staging:
    """One batch worth of memory on the CPU, page-locked where a GPU reads it, and the same fields on the device."""

    def __init__(self, schema: TrajectorySchema, trajectories: int, device: torch.device, first: int = 0) -> None:
        """`first` is the actor of the first stream."""
        self.schema, self.device, self.num_envs, self.first = schema, device, schema.num_envs, first
        self.arrays: dict[str, Array] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        lanes = trajectories * schema.num_envs
        for entry in schema.fields:
            axis = 0 if entry.name.startswith("state.") else 1
            if entry.name == "version":
                shape: tuple[int, ...] = (entry.shape[0], trajectories)
            else:
                shape = (*entry.shape[:axis], lanes, *entry.shape[axis + 1 :])
            dtype = torch.from_numpy(np.zeros(0, entry.dtype)).dtype
            tensor = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
            self.tensors[entry.name], self.arrays[entry.name] = tensor, tensor.numpy()
        self.lanes = torch.zeros(lanes, dtype=torch.int64)
        self.copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.batch: Batch
        if device.type == "cpu":
            self.batch = self._make_batch()  # the memory itself

    def put(self, position: int, stream: int, views: dict[str, Array]) -> None:
        """Copies one slot into the lanes of its position."""
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
        """Says whose lanes lie at a position."""
        lanes = slice(position * self.num_envs, (position + 1) * self.num_envs)
        actor = self.first + stream
        self.lanes[lanes] = torch.arange(actor * self.num_envs, (actor + 1) * self.num_envs)

    def check(self) -> None:
        """Refuses NaN and infinity before anything learns from them."""
        for name in ("reward", *self.schema.observation_names):
            array = self.arrays[name]
            with np.errstate(over="ignore", invalid="ignore"):  # one look at all of it; a sum may overflow
                if not np.issubdtype(array.dtype, np.floating) or np.isfinite(array.sum()):
                    continue
            bad = np.argwhere(~np.isfinite(array))
            if len(bad):
                step, column = int(bad[0][0]), int(bad[0][1])
                actor, env = divmod(int(self.lanes[column]), self.num_envs)
                raise DivergedError(
                    f"{name} is {array[tuple(bad[0])]} at step {step} of a trajectory of actor {actor}, environment "
                    f"{env} (index {bad[0][2:].tolist()} of the value). The environment must give finite numbers: "
                    "check it, or wrap it to clip what it gives."
                )

    def wait(self) -> None:
        """Until the device has read what was staged here before."""
        if self.copied is not None:
            self.copied.synchronize()

    def move(self) -> None:
        """Shows the batch to the device: to a GPU by copies that go on while the caller does."""
        if self.copied is not None:
            self.batch = self._make_batch()
            self.copied.record()

    def _make_batch(self) -> Batch:
        schema = self.schema
        move = {name: self._move(tensor) for name, tensor in self.tensors.items() if not name.startswith("episode")}
        observation = unflatten(schema.spaces.observation, iter([move[n] for n in schema.observation_names]))
        state = tuple(move[f"state.{i}"] for i in range(len(schema.state_shapes)))
        rest = {name: move[name] for name in BATCH_FIELDS}
        return Batch(observation, **rest, state=state, lanes=self.lanes)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)


class QueueSource(RingSource[Staging]):
    """Batches of trajectories in the order that the lag bound asks for."""

    def __init__(
        self, config: TrainConfig, schema: TrajectorySchema, ring: SlotRing, device: torch.device, learner: int = 0
    ) -> None:
        self.schema, self.first = schema, config.actors_of(learner).start
        super().__init__(config, ring, device)

    def _make_staging(self) -> Staging:
        return Staging(self.schema, self.batch_size, self.device, self.first)

    def _count(self, staging: Staging, version: int) -> None:
        counters, arrays = self.counters, staging.arrays
        lag, valid = version - arrays["version"], arrays["valid"]
        self._count_lag(lag, valid.reshape(*lag.shape, -1).sum(-1))  # valid steps per row of each trajectory
        length = arrays["episode_length"]
        ended = length.nonzero()
        counters.episodes += len(ended[0])
        if len(ended[0]):
            counters.note_episodes(arrays["episode_return"][ended].tolist(), length[ended].tolist())
