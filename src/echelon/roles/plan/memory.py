"""The memory that the roles of a run share: how large it is, where it lies, and making it. Needs no torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path

from echelon.hosts.messages import Assignment
from echelon.hosts.ownership import Ownership
from echelon.roles.context import Context
from echelon.roles.frame_stacks import image_stacks
from echelon.roles.journal import Journal
from echelon.roles.plan.findings import USER_LAYOUT, Prepared
from echelon.roles.plan.layouts import act_layout, window
from echelon.roles.plan.replay import ReplayPlan
from echelon.roles.plan.start import PRELOAD
from echelon.transport.act_board import ActBoard
from echelon.transport.session import make_secret
from echelon.transport.shared_memory import SlotLayout, SlotRing, WeightsBoard
from echelon.transport.slot_wire import SlotBytes, Stack


class Memory(ABC):
    """The shared memory of a run; a part is made, or found, when asked for."""

    def __init__(self, context: Context) -> None:
        self.context, self.schema = context, context.schema

    @property
    @abstractmethod
    def slots(self) -> SlotLayout:
        """What lies in a slot of the ring."""

    @property
    @abstractmethod
    def weights_bytes(self) -> int:
        """What is published, be it of our model or of the user's own policy."""

    @cached_property
    def replay(self) -> ReplayPlan:
        """The parts of a run that learns from replayed transitions."""
        return ReplayPlan(self.context)

    def ring(self, learner: int = 0) -> SlotRing:
        """The slots of the actors that a learner takes from."""
        train, folder = self.context.train, self.context.session
        if train.learner.num_learners > 1:
            folder /= f"ring-{learner}"
            folder.mkdir(exist_ok=True)
        return SlotRing(folder, self.slots, self._num_streams(learner), window(train))

    def _num_streams(self, learner: int = 0) -> int:
        return self.context.streams[1] if self.context.streams else len(self.context.train.actors_of(learner))

    # Other hosts.

    @cached_property
    def slot_bytes(self) -> SlotBytes:
        """A slot as it crosses to another host."""
        stacks, actor = [], self.context.train.actor
        for leaf in image_stacks(self.context.spaces):
            place = next(field for field in self.schema.fields if field.name == leaf.path)
            frames, frame_bytes = leaf.shape[0], math.prod(leaf.shape[1:])
            stacks.append(Stack(place.offset, actor.trajectory + 1, actor.envs, frames, frame_bytes))
        return SlotBytes(self.schema.nbytes, tuple(stacks))

    def raw_ring(self) -> SlotRing:
        """The slots of the actors as bytes."""
        return SlotRing(self.context.session, self.slot_bytes, self._num_streams(), window(self.context.train))

    def ownership(self) -> Ownership:
        return Ownership(self.context.session, self._num_streams())

    @property
    def carrier_file(self) -> Path:
        """Where the carrier writes the address that host agents bring slots to."""
        return self.context.session / "carrier.address"

    def assignment(self) -> Assignment:
        """What a host needs to know before its first role."""
        return Assignment(
            slots=window(self.context.train),
            slot=self.slot_bytes.to_wire(),
            weights=self.weights_bytes,
            preload=list(PRELOAD),
        )

    def board(self) -> WeightsBoard:
        return WeightsBoard(self.context.session, self.weights_bytes)

    @property
    def user_layout_file(self) -> Path:
        return self.context.session / USER_LAYOUT

    @property
    def workers_file(self) -> Path:
        """Where the gateway writes the address that workers come to."""
        return self.context.session / "workers.address"

    def act_board(self) -> ActBoard:
        return ActBoard(self.context.session, act_layout(self.context))

    def act_address_file(self, server: int) -> Path:
        """Where an inference server that is asked over TCP writes its address."""
        return self.context.session / f"act-{server}.address"

    def shared_bytes(self) -> int:
        """What the run needs in shared memory."""
        config = self.context.train
        acting = act_layout(self.context).nbytes if config.acting.mode == "central" else 0
        shared = WeightsBoard.size(self.weights_bytes) + acting
        shared += Journal.size() if config.has_workers else 0
        if config.algorithm.experience == "replay":
            return shared + self.replay.nbytes
        return shared + SlotRing.size(self.slots, config.actor.num_actors, window(config))

    def make(self) -> list[str]:
        """Makes all of the memory, before any role looks for it; returns what to tell the user of it."""
        news = []
        if self.context.train.algorithm.experience == "replay":
            news = self.replay.make()
        else:
            for learner in range(self.context.train.learner.num_learners):
                self.ring(learner).close()
        self.board()
        if "tcp" in (self.context.train.acting.transport, self.context.train.replay.transport):
            make_secret(self.context.session)
        if self.context.train.acting.mode == "central":
            self.act_board()
        return news


class PreparedMemory(Memory):
    """The same in a process without the model, by the sizes that the preparation found."""

    def __init__(self, context: Context, prepared: Prepared) -> None:
        super().__init__(context)
        self._prepared = prepared

    @property
    def slots(self) -> SlotLayout:
        return SlotBytes(self._prepared.slot_bytes)

    @property
    def weights_bytes(self) -> int:
        return self._prepared.weights_bytes
