"""Roles created by tests in one process with their own session; the data an actor wrote, and the expected data."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echelon.config import TrainConfig
from echelon.envs.make import probe_spaces
from echelon.roles.actor import Actor
from echelon.roles.context import Context
from echelon.roles.inference import Inference
from echelon.roles.learner import Learner
from echelon.roles.loss_account import LossAccount
from echelon.roles.plan.parts import Plan
from echelon.world.node import Node

Array = np.ndarray[Any, Any]
Trajectory = dict[str, Array]


class Stage:
    """A session folder and a world in this process, in which tests create roles."""

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        session = folder / "session"
        session.mkdir()
        (folder / "run" / "checkpoints").mkdir(parents=True)
        address = f"inproc://{folder}"
        self.world = Node.host(address)
        self.messages: list[str] = []
        self.world.serve("message", self.messages.append)
        self.world.serve("env_restarted", self.messages.append)
        self.world.serve("disk", lambda part, error: self.messages.append(f"{part}: {error or 'written'}"))
        for name in ("train", "finished", "evaluation"):
            self.world.serve(name, lambda *told: None)
        context = Context(
            name="coordinator", index=0, incarnation=0, generation=0, train=config, spaces=probe_spaces(config.env),
            state_shapes=(), session=session, address=address, run_dir=folder / "run", started_at=time.monotonic(),
            shares_process=config.engine == "inline",
        )  # fmt: skip
        shapes = Plan(context).model.network.state_shapes
        self.context = dataclasses.replace(context, state_shapes=shapes)
        self.plan = Plan(self.context)
        counts_only = config.engine == "hosts" and config.experience == "replay"
        self.ring, self.board = self.plan.slot_counts() if counts_only else self.plan.ring(), self.plan.board()
        self.plan.make()
        self.board.publish(self.plan.model.parts(), 1)
        self.roles: list[Any] = []

    def actor(self, index: int = 0, incarnation: int = 0) -> Actor:
        name = f"actor-{index}-{incarnation}"
        actor = Actor(dataclasses.replace(self.context, name=name, index=index, incarnation=incarnation))
        self.roles.append(actor)
        return actor

    def inference(self, incarnation: int = 0) -> Inference:
        inference = Inference(dataclasses.replace(self.context, name="inference-0", incarnation=incarnation))
        self.roles.append(inference)
        return inference

    def learner(self) -> Learner:
        learner = Learner(dataclasses.replace(self.context, name="learner"))
        self.roles.append(learner)
        return learner

    def collect(self, actor: Actor, count: int, inference: Inference | None = None) -> list[Trajectory]:
        """The next `count` trajectories of `actor`, copied out of the ring and released."""
        found = []
        for _ in range(count):
            self.ring.grant(actor.index, 1)
            while not self.ring.num_ready(actor.index):
                assert actor.step(0.0) or (inference is not None and inference.step(0.0))
            found.append({name: view.copy() for name, view in self.ring.readable(actor.index).items()})
            self.ring.release(actor.index)
        return found

    def close(self) -> None:
        for role in self.roles:
            role.close()
        self.ring.close()
        self.world.close()


class Noted(LossAccount):
    """A loss account that keeps the values of every minibatch."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[dict[str, float]] = []

    def note(self, names: tuple[str, ...], values: torch.Tensor) -> None:
        super().note(names, values)
        self.noted.append(dict(zip(names, values.tolist(), strict=True)))


def joined(trajectories: list[Trajectory]) -> Trajectory:
    """Joins trajectories to one stream of rows; checks that each begins with the last row of the previous one."""
    for before, after in itertools.pairwise(trajectories):
        for name in ("observation", "first"):
            np.testing.assert_array_equal(after[name][0], before[name][-1], err_msg=f"{name} at a border")
    stream = {name: np.concatenate([t[name] for t in trajectories]) for name in trajectories[0] if "state" not in name}
    for name in ("observation", "first"):
        rows = [t[name][:-1] for t in trajectories] + [trajectories[-1][name][-1:]]
        stream[name] = np.concatenate(rows)
    return stream


def foretold(make: Callable[[], Any], seed: int, actions: Array) -> dict[str, list[Any]]:
    """The expected steps of one environment for `actions`, by plain gymnasium calls with NEXT_STEP autoreset."""
    env = make()
    rows: dict[str, list[Any]] = {"observation": [env.reset(seed=seed)[0]], "first": [True]}
    names = ("reward", "terminated", "truncated", "valid", "episode_return", "episode_length")
    rows.update({name: [] for name in names})
    over, total, length = False, 0.0, 0
    for action in actions:
        if over:
            observation, reward, terminated, truncated, valid = env.reset()[0], 0.0, False, False, False
        else:
            observation, reward, terminated, truncated, _ = env.step(action)
            valid, total, length = True, total + reward, length + 1
        over = terminated or truncated
        ended = (total, length) if over else (0.0, 0)
        for name, value in zip(names, (reward, terminated, truncated, valid, *ended), strict=True):
            rows[name].append(value)
        rows["observation"].append(observation)
        rows["first"].append(not valid)
        if over:
            total, length = 0.0, 0
    return rows
