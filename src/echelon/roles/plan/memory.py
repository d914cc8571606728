"""The shared memory of a run: its size, its location and its creation. Needs no torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from echelon import config_io
from echelon.engines.process import ProcessSpec
from echelon.hosts.messages import Assignment
from echelon.hosts.ownership import Ownership
from echelon.roles.context import Context
from echelon.roles.frame_stacks import image_stacks
from echelon.roles.journal import Journal
from echelon.roles.plan.findings import USER_LAYOUT, Prepared
from echelon.roles.plan.layouts import act_layout, trajectory_schema, window
from echelon.roles.plan.replay import ReplayPlan
from echelon.roles.plan.start import PRELOAD
from echelon.transport.act_board import ActBoard
from echelon.transport.shared_memory import SlotLayout, SlotRing, WeightsBoard
from echelon.transport.slot_wire import SlotBytes, Stack


class Memory(ABC):
    """The shared memory of a run; each part is created or opened on first use."""

    def __init__(self, context: Context) -> None:
        self.context, self.schema = context, trajectory_schema(context)

    @property
    @abstractmethod
    def slots(self) -> SlotLayout:
        """The layout of a slot of the ring."""

    @property
    @abstractmethod
    def weights_bytes(self) -> int:
        """The bytes of the published weights, of a built-in model or a user policy."""

    @cached_property
    def replay(self) -> ReplayPlan:
        """The parts that only runs with replay have."""
        return ReplayPlan(self.context)

    def ring(self, learner: int = 0) -> SlotRing:
        """Opens the ring with the slots of a learner's actors."""
        train, folder = self.context.train, self.context.session
        if train.learner.num_learners > 1:
            folder /= f"ring-{learner}"
            folder.mkdir(exist_ok=True)
        return SlotRing(folder, self.slots, self._num_streams(learner), window(train))

    @property
    def stream(self) -> int:
        """The stream of this actor in its ring, which holds the actors of one learner."""
        context, train = self.context, self.context.train
        return context.index - train.actors_of(train.learner_of(context.index)).start

    def _num_streams(self, learner: int = 0) -> int:
        return len(self.context.train.actors_of(learner))

    # Other hosts.

    @cached_property
    def slot_bytes(self) -> SlotBytes:
        """The encoding of a slot that is sent between hosts."""
        if self.context.train.algorithm.slots == "gradients":
            return SlotBytes(self.slots.nbytes)
        stacks, actor = [], self.context.train.actor
        for leaf in image_stacks(self.context.spaces):
            place = next(field for field in self.schema.fields if field.name == leaf.path)
            frames, frame_bytes = leaf.shape[0], math.prod(leaf.shape[1:])
            stacks.append(Stack(place.offset, actor.trajectory + 1, actor.envs_per_actor, frames, frame_bytes))
        return SlotBytes(self.schema.nbytes, tuple(stacks))

    def raw_ring(self) -> SlotRing:
        """Opens the ring with slots as raw bytes."""
        return SlotRing(self.context.session, self.slot_bytes, self._num_streams(), window(self.context.train))

    def slot_counts(self) -> SlotRing:
        """Opens the counts of slots and grants; with replay, those of a ring whose slots are empty."""
        if self.context.train.algorithm.experience != "replay":
            return self.raw_ring()
        return SlotRing(self.context.session, SlotBytes(0), self._num_streams(), window(self.context.train))

    def ownership(self) -> Ownership:
        return Ownership(self.context.session, self._num_streams())

    @property
    def carrier_file(self) -> Path:
        """The file in which the carrier writes its address for the host agents."""
        return self.context.session / "carrier.address"

    def assignment(self) -> Assignment:
        """Returns the sizes and modules that a host needs before its first role starts."""
        return Assignment(
            streams=self.context.train.actor.num_actors,
            slots=window(self.context.train),
            slot=self.slot_bytes.to_wire(),
            weights=self.weights_bytes,
            has_bulk=not self.context.train.is_spread,
            act_bytes=self._act_bytes // self.context.train.actor.num_actors,
            preload=list(PRELOAD),
            check=asdict(ProcessSpec("check", "echelon.roles.plan.host_check:host_check", self._checked)),
        )

    @property
    def _checked(self) -> dict[str, Any]:
        """What a host must be able to create."""
        train, spaces = config_io.to_json(self.context.train), self.context.spaces.to_json()
        return {"train": train, "spaces": spaces, "weights_bytes": self.weights_bytes}

    def board(self) -> WeightsBoard:
        return WeightsBoard(self.context.session, self.weights_bytes)

    @property
    def user_layout_file(self) -> Path:
        return self.context.session / USER_LAYOUT

    @property
    def workers_file(self) -> Path:
        """The file in which the gateway writes its address for the workers."""
        return self.context.session / "workers.address"

    def act_board(self) -> ActBoard:
        return ActBoard(self.context.session, act_layout(self.context))

    def act_address_file(self, server: int) -> Path:
        """Returns the file in which an inference server writes its TCP address."""
        return self.context.session / f"act-{server}.address"

    @property
    def _act_bytes(self) -> int:
        """Bytes of the board of act requests, which has seats for all actors of the run on every host."""
        return act_layout(self.context).nbytes if self.context.train.acting.mode == "central" else 0

    def shared_bytes(self) -> int:
        """Returns the bytes of shared memory that the run needs."""
        config = self.context.train
        shared = WeightsBoard.size(self.weights_bytes) + self._act_bytes
        shared += Journal.size() if config.has_workers else 0
        if config.algorithm.experience == "replay":
            return shared + self.replay.nbytes
        return shared + SlotRing.size(self.slots, config.actor.num_actors, window(config))

    def make(self) -> list[str]:
        """Creates all shared memory before any role opens it. Returns messages for the user."""
        news = []
        if self.context.train.algorithm.experience == "replay":
            news = self.replay.make()
        else:
            for learner in range(self.context.train.learner.num_learners):
                self.ring(learner).close()
        self.board()
        if self.context.train.acting.mode == "central":
            self.act_board()
        return news


class PreparedMemory(Memory):
    """The shared memory in a process without the model; the sizes come from the preparation."""

    def __init__(self, context: Context, prepared: Prepared) -> None:
        super().__init__(context)
        self._prepared = prepared

    @property
    def slots(self) -> SlotLayout:
        return SlotBytes(self._prepared.slot_bytes)

    @property
    def weights_bytes(self) -> int:
        return self._prepared.weights_bytes
