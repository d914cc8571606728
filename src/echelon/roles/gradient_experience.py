"""Gradient experience: an actor computes gradients from its own rollouts and sends those instead of the steps.

A rollout is stored in the actor's private memory. When it is complete, the actor computes one gradient for each part of
it, at the weights that acted, and writes it into its next slot of the ring. The actor starts a rollout only when the
learner has granted a slot for each of its gradients, so it never waits with a computed gradient. If the actor dies, the
gradients that it committed count, and its successor continues at `head`; a partly written slot is never visible to the
learner.
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
from echelon.roles.experience import UNSTAMPED, Row, SlotRows, Team
from echelon.roles.gradient_slots import write
from echelon.roles.queue_source import Staging

if TYPE_CHECKING:
    from echelon.config import A3cConfig
    from echelon.roles.plan.parts import Plan

Array = np.ndarray[Any, Any]


class GradientExperience:
    """Writes gradients into the actor's slots. The learner admits each one and rings `free` when it does."""

    def __init__(self, plan: Plan, model: Model, station: Station) -> None:
        """The model of `plan` acts and follows the weights board; gradients are computed with its copy `model`."""
        self.ring, self.stream, self.station, self.schema = plan.ring(), plan.stream, station, plan.schema
        self.acting = plan.model
        self.rule = A3c(cast("A3cConfig", plan.context.train.algorithm), model)
        self.columns = self.rule.columns(self.schema.num_envs)
        self.rollout = Staging(self.schema, 1, torch.device("cpu"))
        self.rollout.place(0, plan.context.index)
        self.views = {**self.rollout.arrays, "version": self.rollout.arrays["version"][:, 0]}

    @property
    def head(self) -> int:
        return 0  # no other process counts rollouts

    def pages(self, index: int, columns: slice) -> list[SlotRows]:
        del index
        return [SlotRows(self.schema, self.views, columns)]

    def admits(self, trajectory: int) -> bool:
        del trajectory
        return bool(self.ring.head[self.stream] + len(self.columns) <= self.ring.granted[self.stream])

    def open(self, trajectory: int) -> None:
        del trajectory
        self.views["version"].fill(UNSTAMPED)

    def stepped(self, team: Team, row: Row, reply: ActReply) -> None:
        """Does nothing: gradients are computed when the rollout is complete."""

    def left(self, team: Team, teams: Sequence[Team]) -> None:
        """Computes and commits the gradients of the complete rollout one by one. There is only one team."""
        del team, teams
        self.rollout.check()
        with torch.no_grad():
            for mine, acting in zip(self.rule.model.tensors(), self.acting.tensors(), strict=True):
                mine.copy_(acting)
        start = time.perf_counter()
        for columns, gradient in zip(self.columns, self.rule.gradients(self.rollout.batch), strict=True):
            self._count_learning(start)
            write(self.ring.writable(self.stream), gradient, self.views, columns)
            self.ring.commit(self.stream)
            self.station.progress += 1
            start = time.perf_counter()

    def _count_learning(self, start: float) -> None:
        """Moves the time since `start` from phase `transfer`, to which the actor adds all of `left`, to `learn`."""
        seconds = time.perf_counter() - start
        self.station.phases["learn"] += seconds
        self.station.phases["transfer"] -= seconds

    def wait(self, teams: Sequence[Team], timeout_s: float) -> None:
        doorbell = self.ring.free[self.stream]
        doorbell.clear()
        if not self.admits(teams[0].trajectory):
            self.station.wait(timeout_s, [doorbell.descriptor])

    def close(self) -> None:
        self.ring.close()
