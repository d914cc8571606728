"""The queue source: trajectories out of the slot ring, side by side in one batch, and what is counted of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from echelon.config import TrainConfig
from echelon.errors import DivergedError
from echelon.roles.ring_source import RingSource
from echelon.schema import Batch, TrajectorySchema, unflatten
from echelon.transport.shared_memory import SlotRing

Array = np.ndarray[Any, Any]
BATCH_FIELDS = ("first", "action", "log_prob", "reward", "terminated", "truncated", "valid")


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
        self.batch: Batch
        self.copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

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
        """Makes the batch: on a GPU by copies that go on while the caller does."""
        schema = self.schema
        move = {name: self._move(tensor) for name, tensor in self.tensors.items() if not name.startswith("episode")}
        observation = unflatten(schema.spaces.observation, iter([move[n] for n in schema.observation_names]))
        state = tuple(move[f"state.{i}"] for i in range(len(schema.state_shapes)))
        rest = {name: move[name] for name in BATCH_FIELDS}
        self.batch = Batch(observation, **rest, state=state, lanes=self.lanes)
        if self.copied is not None:
            self.copied.record()

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
        for t, lane in np.argwhere(length).tolist():
            counters.episodes += 1
            counters.note_episode(float(arrays["episode_return"][t, lane]), int(length[t, lane]))
