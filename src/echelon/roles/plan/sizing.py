"""The preparation: a process that determines, before a run starts, the values that need its environment or its model.

It creates an environment, reads its spaces and checks a few steps of it, or waits for the first worker to send the
spaces; then it creates the model to read its sizes. It writes the result to the session folder. The engine runs it like
a role, in a separate process. The coordinator therefore needs neither torch nor the packages of the environment, and
survives an environment that crashes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echelon import config_io
from echelon.algorithms.model import Model
from echelon.config import TrainConfig
from echelon.custom_network import sample_observation
from echelon.envs.check import quick_check
from echelon.envs.make import probe_spaces
from echelon.envs.vector import EnvGroup
from echelon.roles.context import COORDINATOR
from echelon.roles.gradient_slots import GradientSchema
from echelon.roles.plan.choice import settled
from echelon.roles.plan.findings import PREPARED, USER_LAYOUT, Prepared
from echelon.roles.plan.layouts import minibatch_samples, num_gradients
from echelon.roles.plan.placement import learner_device, learner_threads, server_device
from echelon.roles.user_policy import StateLayout
from echelon.runs.weights import find_weights
from echelon.schema import Spaces, TrajectorySchema
from echelon.world.node import Node

NUM_TIMED = 5  # forward passes of which the fastest counts: the first ones allocate


class Preparation:
    """The preparation role: determines everything in its only step and finishes."""

    def __init__(
        self,
        train: TrainConfig,
        session: Path,
        address: str,
        generation: int,
        spaces: Spaces | None,
        *,
        shares_process: bool = False,
    ) -> None:
        """`spaces` is set if the user's program passes them; `address` is the address of the run's world.

        `shares_process` is set if the process also runs other roles.
        """
        self.train, self.session, self.address, self.generation = train, session, address, generation
        self.spaces, self.shares_process, self.finished = spaces, shares_process, False
        self.warnings: list[str] = []  # of the check of the environment

    def step(self, timeout_s: float) -> bool:
        del timeout_s
        found = self._for_user_policy() if self.train.algorithm.is_users else self._for_algorithm()
        replace(found, warnings=tuple(self.warnings)).write(self.session / PREPARED)
        self.finished = True
        return True

    def _for_user_policy(self) -> Prepared:
        """Returns the result for a user policy."""
        layout = StateLayout.from_json(json.loads((self.session / USER_LAYOUT).read_text()))
        spaces, address = self._find_spaces(layout)
        return Prepared(spaces, address, self.train.learner.threads, weights_bytes=layout.nbytes)

    def _for_algorithm(self) -> Prepared:
        """Returns the result for a built-in algorithm."""
        train = self.train
        spaces, address = self._find_spaces(None)
        model = Model(train.network, spaces, train.algorithm, seed=train.seed)
        num_parameters, shapes = model.parameters.numel(), model.network.state_shapes
        threads = learner_threads(train, num_parameters, minibatch_samples(train))
        device, choice, act_s = learner_device(train, num_parameters), settled(train), None
        if choice is None or choice.mode == "central":
            servers = {server_device(train, num_parameters, index) for index in range(train.acting.servers)}
            if choice is None and "cpu" not in servers and not self.shares_process:
                act_s = _time_acting(model, spaces, train.actor.envs_per_actor)
        if train.run.init_from and self.generation == 0:
            model.load_weights(find_weights(train.run.init_from), train.run.init_from)
        slots: TrajectorySchema | GradientSchema = TrajectorySchema(
            spaces, train.actor.trajectory, train.actor.envs_per_actor, shapes
        )
        if train.algorithm.slots == "gradients":
            slots = GradientSchema.of(train.actor, num_gradients(train), model)
        return Prepared(spaces, address, threads, device, act_s, shapes, model.nbytes, slots.nbytes)

    def _find_spaces(self, layout: StateLayout | None) -> tuple[Spaces, str]:
        """Returns the spaces, and the address to which workers connect."""
        workers = self.train.workers
        if self.spaces is not None:
            return self.spaces, workers.address
        if not (self.train.has_workers and workers.spaces == "worker"):
            return probe_spaces(self.train.env, self._check), workers.address
        from echelon.roles.pending_workers import await_spaces

        with contextlib.closing(Node.join(self.address, "preparation")) as node:
            return await_spaces(self.train, layout, functools.partial(node.post, COORDINATOR, "message"))

    def _check(self, group: EnvGroup) -> None:
        self.warnings = quick_check(group, self.train.env, may_interrupt=not self.shares_process)

    def close(self) -> None:
        """Does nothing: the preparation keeps nothing open."""


def _time_acting(model: Model, spaces: Spaces, num_rows: int) -> float:
    """Returns the seconds of a forward pass over `num_rows` observations on one core."""
    torch.set_num_threads(1)
    model.network.eval()
    observation = sample_observation(spaces.observation, (num_rows,), np.random.default_rng(0))
    state = model.network.initial_state(num_rows, "cpu")
    seconds, first = [], torch.ones(num_rows, dtype=torch.bool)
    with torch.inference_mode():
        for _ in range(NUM_TIMED):
            begun = time.perf_counter()
            model.network.act(observation, state, first)
            seconds.append(time.perf_counter() - begun)
    return min(seconds)


def preparation(config: dict[str, Any]) -> Preparation:
    """The entry point of a preparation process."""
    train, spaces = config["train"], config["spaces"]
    return Preparation(
        train if isinstance(train, TrainConfig) else config_io.from_json(train),
        Path(config["session"]),
        config["address"],
        config["generation"],
        Spaces.from_json(spaces) if spaces else None,
        shares_process=isinstance(train, TrainConfig),
    )
