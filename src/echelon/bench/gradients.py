"""Learning where actors bring gradients: finding those of a rollout, adding them up, stepping and publishing."""

from __future__ import annotations

import itertools
from typing import Any, cast

import numpy as np
import torch

from echelon.algorithms import build_algorithm
from echelon.algorithms.a3c import A3c
from echelon.config import A3cConfig, replace
from echelon.roles.gradient_slots import write
from echelon.roles.gradient_source import GradientSource
from echelon.roles.plan.parts import Plan
from echelon.roles.queue_source import Staging
from echelon.roles.update import LocalUpdate, LossAccount, learn_once

Array = np.ndarray[Any, Any]


class GradientLearning:
    """What actors and learner do with one rollout, again and again, as actors in turn."""

    def __init__(self, plan: Plan, views: dict[str, Array]) -> None:
        config = plan.context.train
        self.model, self.ring, self.board = plan.model, plan.ring(), plan.board()
        self.algorithm = build_algorithm(config.algorithm, self.model, config.seed)
        # Hardly a learning rate: the same data again and again would drive the weights to where arithmetic is slow.
        self.update = LocalUpdate(replace(config.optimizer, learning_rate=1e-12), self.model)
        self.source = GradientSource(config, plan.gradient_slots, self.ring, self.model.device)
        self.rule = A3c(cast(A3cConfig, config.algorithm), Plan(plan.context).model)
        self.rollout = Staging(plan.schema, 1, torch.device("cpu"))
        self.rollout.put(0, 0, views)
        self.rollout.move()
        self.views = views
        self.streams = itertools.cycle(range(self.ring.num_streams))
        self.num_steps = plan.schema.num_steps * plan.schema.num_envs
        self._publish()

    def _publish(self) -> None:
        self.board.publish(self.model.parts(), self.board.version + 1)
        self.source.admit()

    def learn(self) -> int:
        """One rollout."""
        stream, pieces = next(self.streams), self.rule.pieces(self.rollout.num_envs)
        self.views["version"].fill(self.board.version)
        for columns, gradient in zip(pieces, self.rule.gradients(self.rollout.batch), strict=True):
            write(self.ring.writable(stream), gradient, self.views, columns)
            self.ring.commit(stream)
        while (batch := self.source.take(self.board.version)) is not None:
            account = LossAccount()
            self.update.schedule(0.0)
            learn_once(self.algorithm, batch, self.update, account)
            account.newest.tolist()  # the learner looks at it
            self._publish()
        self.ring.ready.clear()
        return self.num_steps

    def close(self) -> None:
        self.ring.close()
