"""Gradient experience: an actor learns from its own rollout and hands over the gradients, not the steps.

A rollout lies in memory of the actor's own. When it is through, each piece of it gives a gradient, at the weights that
acted, which goes into the actor's next slot of the ring. The actor enters a rollout only where the learner has granted
a slot for every gradient of it, so it never waits with one in hand. If it dies, what it committed counts, piece by
piece, and its successor writes on at `head`; a slot that was half written was never shown to anybody.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from echelon.algorithms.a3c import A3c
from echelon.algorithms.model import Model
from echelon.roles.acting import ActReply
from echelon.roles.context import Station
from echelon.roles.experience import UNSTAMPED, EpisodeLedger, Row, SlotRows, Team
from echelon.roles.gradient_slots import write
from echelon.roles.queue_source import Staging

if TYPE_CHECKING:
    from echelon.config import A3cConfig
    from echelon.roles.plan.parts import Plan

Array = np.ndarray[Any, Any]


class GradientExperience:
    """Gradients in the actor's slots; the learner admits each, and rings `free` when it does."""

    def __init__(self, plan: Plan, model: Model, station: Station) -> None:
        """The model of `plan` acts and follows the weights board; `model`, alike, is for gradients at its weights."""
        self.ring, self.actor, self.station, self.schema = plan.ring(), plan.context.index, station, plan.schema
        self.acting = plan.model
        self.rule = A3c(cast("A3cConfig", plan.context.train.algorithm), model)
        self.columns = self.rule.columns(self.schema.num_envs)
        self.rollout = Staging(self.schema, 1, torch.device("cpu"))
        self.rollout.place(0, self.actor)
        self.views = {**self.rollout.arrays, "version": self.rollout.arrays["version"][:, 0]}
        self.ledger = EpisodeLedger(self.schema.num_envs)

    @property
    def head(self) -> int:
        return 0  # rollouts are counted by nobody else

    def pages(self, index: int, columns: slice) -> list[SlotRows]:
        del index
        return [SlotRows(self.schema, self.views, columns)]

    def admits(self, trajectory: int) -> bool:
        del trajectory
        return bool(self.ring.head[self.actor] + len(self.columns) <= self.ring.granted[self.actor])

    def open(self, trajectory: int) -> None:
        del trajectory
        self.views["version"].fill(UNSTAMPED)

    def stepped(self, team: Team, row: Row, answer: ActReply) -> None:
        """A rollout is learned from when it is whole."""

    def left(self, team: Team, teams: Sequence[Team]) -> None:
        """The only team has gone through its rollout: its gradients are handed over one by one."""
        del team, teams
        self.ledger.record(self.views)
        self.rollout.check()
        with torch.no_grad():
            for mine, acting in zip(self.rule.model.tensors(), self.acting.tensors(), strict=True):
                mine.copy_(acting)
        start = time.perf_counter()
        for columns, gradient in zip(self.columns, self.rule.gradients(self.rollout.batch), strict=True):
            self._count_learning(start)
            write(self.ring.writable(self.actor), gradient, self.views, columns)
            self.ring.commit(self.actor)
            self.station.progress += 1
            start = time.perf_counter()

    def _count_learning(self, start: float) -> None:
        """Of the time that the actor spends on leaving, which it counts as handing over."""
        seconds = time.perf_counter() - start
        self.station.phases["learn"] += seconds
        self.station.phases["transfer"] -= seconds

    def wait(self, teams: Sequence[Team], timeout_s: float) -> None:
        doorbell = self.ring.free[self.actor]
        doorbell.clear()
        if not self.admits(teams[0].trajectory):
            self.station.wait(timeout_s, [doorbell.descriptor])

    def close(self) -> None:
        self.ring.close()
