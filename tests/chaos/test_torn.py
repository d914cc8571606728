"""Actors are killed at random moments, repeatedly: every row that the learner reads is whole and in its place."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echelon.config import TrainConfig
from echelon.config import replace as change
from echelon.engines.local import LocalEngine
from echelon.engines.process import ProcessSpec
from echelon.roles.context import Context
from echelon.roles.plan.parts import Plan
from echelon.roles.queue_source import QueueSource
from echelon.schema import Spaces
from echelon.transport.session import create_session
from echelon.world.node import Node
from running import wait_until
from unruly import WitnessEnv, evidence

Array = np.ndarray[Any, Any]
NUM_ACTORS, NUM_ENVS, NUM_STEPS = 2, 4, 16


def check_trajectory(views: dict[str, Array]) -> None:
    """Checks that every row is consistent in itself and with the row before it."""
    seen, valid, first = views["observation"], views["valid"], views["first"]
    np.testing.assert_array_equal(seen, evidence(seen[..., :5]))
    seed, episode, t, action = seen[..., 0] * 65536.0 + seen[..., 1], seen[..., 2], seen[..., 3], seen[..., 4]
    assert (seed == seed[0]).all()
    assert (first[1:] == ~valid).all()
    np.testing.assert_array_equal(episode[1:], episode[:-1] + ~valid)
    np.testing.assert_array_equal(t[1:], np.where(valid, t[:-1] + 1, 0))
    np.testing.assert_array_equal(action[1:], np.where(valid, views["action"], 0))
    np.testing.assert_array_equal(views["reward"], np.where(valid, seen[1:, :, -1], 0))
    assert (views["version"] == views["version"][0]).all()


def check_sequence(before: dict[str, Array] | None, now: dict[str, Array]) -> bool:
    """Checks that a trajectory continues its predecessor or starts a new incarnation; returns True for the latter."""
    row = now["observation"][0]
    if before is not None and (before["observation"][-1] == row).all():
        assert (before["first"][-1] == now["first"][0]).all()
        assert before["version"][0] <= now["version"][0]
        return False
    assert now["first"][0].all() and (row[:, 2] == 1).all() and (row[:, 3] == 0).all()
    assert before is None or not (before["observation"][-1][:, :2] == row[:, :2]).all(-1).any()
    return True


class Bench:
    """The learner's side of a run in this process, with real actors that it kills and replaces."""

    def __init__(self, session: Path, run_dir: Path) -> None:
        env = WitnessEnv()
        config = change(
            TrainConfig(),
            **{
                "env.id": "unruly:WitnessEnv",
                "actor.num_actors": NUM_ACTORS,
                "actor.envs": NUM_ENVS,
                "actor.trajectory": NUM_STEPS,
                "actor.slots": 3,
                "learner.batch": 1,
            },
        )
        spaces = Spaces(env.observation_space, env.action_space)
        address = f"ipc://{session}/world"
        self.context = Context("host", 0, 0, 0, config, spaces, (), session, address, run_dir, 0.0)
        self.engine = LocalEngine(str(session), ["echelon.roles.actor"])
        self.world = Node.host(address)
        self.plan = Plan(self.context)
        self.ring, self.board = self.plan.ring(), self.plan.board()
        self.source = QueueSource(config, self.plan.schema, self.ring, torch.device("cpu"))
        self.last: list[dict[str, Array] | None] = [None] * NUM_ACTORS
        self.lives, self.num_read, self.deaths = [0] * NUM_ACTORS, [0] * NUM_ACTORS, 0
        self.board.publish(self.plan.model.parts(), 1)
        self.source.admit()
        for index in range(NUM_ACTORS):
            self.start(index, 0)

    def start(self, index: int, incarnation: int) -> None:
        name = f"actor-{index}"
        context = replace(self.context, name=name, index=index, incarnation=incarnation)
        log = str(self.context.run_dir / f"{name}.log")
        self.engine.start(ProcessSpec(name, "echelon.roles.actor:actor", context.to_config(keep_objects=False), log))

    def turn(self) -> None:
        """Replaces dead actors, reads and checks one trajectory if one is ready, and publishes."""
        self.world.poll(0.001)
        for gone in self.engine.exits():
            assert gone.signal == signal.SIGKILL, gone
            self.deaths += 1
            self.start(int(gone.name[-1]), self.deaths)
        released = self.ring.released.copy()
        if self.source.take(self.board.version) is None:
            return
        (stream,) = np.flatnonzero(self.ring.released - released).tolist()
        arrays = self.source.stagings[0].arrays
        views = {name: array.copy() for name, array in arrays.items() if name != "version"}
        views["version"] = arrays["version"][:, 0].copy()
        check_trajectory(views)
        assert 1 <= views["version"][0] <= self.board.version
        self.lives[stream] += check_sequence(self.last[stream], views)
        self.last[stream] = views
        self.num_read[stream] += 1
        self.board.publish(self.plan.model.parts(), self.board.version + 1)

    def close(self) -> None:
        self.engine.close(0.0)
        self.world.close()
        self.ring.close()


@pytest.fixture
def bench(shm_dir: Path, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(create_session(str(shm_dir)), tmp_path)
    yield bench
    bench.close()


def kill_and_check(bench: Bench, num_kills: int) -> None:
    draw = random.Random(num_kills)

    def turn_until(condition: Callable[[], bool], what: str) -> None:
        wait_until(lambda: condition() or bench.turn(), what)

    for kill in range(num_kills):
        victim = draw.randrange(NUM_ACTORS)
        goal = bench.num_read[victim] + draw.randint(1, 30)
        turn_until(partial(lambda who, num: bench.num_read[who] >= num, victim, goal), f"actor {victim} acts")
        for _ in range(draw.randint(0, 20_000)):  # a random delay, so that it is killed at any point
            pass
        name = f"actor-{victim}"  # the actor may still be starting
        pid = wait_until(lambda name=name: bench.engine.pid(name) or bench.turn(), f"{name} runs")  # type: ignore[misc]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        turn_until(partial(lambda num: bench.deaths > num, kill), "it is dead")
    goals = [num + 10 for num in bench.num_read]
    turn_until(lambda: all(num >= goal for num, goal in zip(bench.num_read, goals, strict=True)), "both act")
    assert bench.deaths == num_kills
    assert NUM_ACTORS <= sum(bench.lives) <= num_kills + NUM_ACTORS
    assert bench.source.counters.dropped == 0


def test_no_row_is_torn_or_mixed(bench: Bench) -> None:
    kill_and_check(bench, 10)


@pytest.mark.full
def test_no_row_is_torn_or_mixed_over_many_kills(bench: Bench) -> None:
    kill_and_check(bench, 200)


def test_the_check_notices_what_it_is_for() -> None:
    """The checks detect a row of another environment, a stale action, a repeated row, a trajectory out of order."""
    env = WitnessEnv()
    shape = (NUM_STEPS + 1, 1)
    views = {"observation": np.zeros((*shape, 32), np.float32), "first": np.zeros(shape, bool)}
    for name, dtype in (("action", np.int64), ("reward", np.float32), ("valid", bool)):
        views[name] = np.zeros((NUM_STEPS, 1), dtype)
    views["version"] = np.ones(NUM_STEPS, np.int64)
    views["observation"][0, 0], over = env.reset(seed=70_000)[0], False
    views["first"][0] = True
    for t in range(NUM_STEPS):
        views["valid"][t], views["first"][t + 1] = not over, over
        if over:
            views["observation"][t + 1, 0], over = env.reset()[0], False
        else:
            views["action"][t] = t % 2
            views["observation"][t + 1, 0], views["reward"][t, 0], over, _, _ = env.step(t % 2)
    check_trajectory(views)
    assert check_sequence(None, views)
    for name, t in (("observation", 3), ("action", 3), ("reward", 3), ("valid", 3), ("version", 3)):
        torn = {key: value.copy() for key, value in views.items()}
        torn[name][t] = torn[name][t - 1] + 1 if name == "version" else torn[name][t - 1]
        if name == "valid":
            torn[name][t] = ~views[name][t]
        with pytest.raises(AssertionError):
            check_trajectory(torn)
    with pytest.raises(AssertionError):
        check_sequence(views, {**views, "observation": views["observation"][2:], "first": views["first"][2:]})
