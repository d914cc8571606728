"""Processes of a run with gradients may be killed at any time: no partial gradient is applied, and others continue."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echelon.algorithms.a3c import REWARD_MOMENTS
from echelon.config import replace as change
from echelon.engines.local import LocalEngine
from echelon.engines.process import ProcessSpec
from echelon.envs.make import probe_spaces
from echelon.presets import preset
from echelon.roles.context import Context
from echelon.roles.plan.parts import Plan
from echelon.transport.session import create_session
from echelon.world.node import Node
from running import Runs, wait_until

Array = np.ndarray[Any, Any]
NUM_ACTORS, NUM_KILLS = 2, 8


class Bench:
    """The learner's side of the ring in this process, with real actors that the test kills and replaces."""

    def __init__(self, session: Path, run_dir: Path) -> None:
        fields = {"actor.num_actors": NUM_ACTORS, "actor.envs": 4, "actor.trajectory": 8, "actor.slots": 2}
        fields |= {"algorithm.minibatches": 2, "network.normalize_observation": True, "acting.mode": "local"}
        config = change(preset("a3c", "CartPole-v1"), **fields, **{"network.hidden": (64, 64)})
        address = f"ipc://{session}/world"
        spaces = probe_spaces(config.env)
        self.context = Context("host", 0, 0, 0, config, spaces, (), session, address, run_dir, 0.0)
        self.engine = LocalEngine(str(session), ["echelon.roles.actor"])
        self.world = Node.host(address)
        self.plan = Plan(self.context)
        self.ring, self.board = self.plan.ring(), self.plan.board()
        self.deaths, self.num_read = 0, [0] * NUM_ACTORS
        self.publish()
        for index in range(NUM_ACTORS):
            self.start(index, 0)

    def start(self, index: int, incarnation: int) -> None:
        context = replace(self.context, name=f"actor-{index}", index=index, incarnation=incarnation)
        spec = ProcessSpec(context.name, "echelon.roles.actor:actor", context.to_config(keep_objects=False), "")
        self.engine.start(spec)

    def publish(self) -> None:
        self.board.publish(self.plan.model.parts(), self.board.version + 1)
        for stream in range(NUM_ACTORS):
            self.ring.grant(stream, self.ring.num_slots)

    def turn(self) -> None:
        """Replaces dead actors; reads, checks and overwrites all slots, so that no old data can pass for new."""
        self.world.poll(0.001)
        for gone in self.engine.exits():
            assert gone.signal == signal.SIGKILL, gone
            self.deaths += 1
            self.start(int(gone.name[-1]), self.deaths)
        for stream in range(NUM_ACTORS):
            while self.ring.num_ready(stream):
                slot = self.ring.readable(stream)
                self.check(slot)
                for view in slot.values():
                    view.fill(np.iinfo(np.int64).max if view.dtype == np.int64 else np.nan)
                self.ring.release(stream)
                self.num_read[stream] += 1
        self.publish()

    def check(self, slot: dict[str, Array]) -> None:
        """Checks that all fields of a slot belong to one part of one rollout."""
        steps, count = int(slot["env_steps"][0]), int(slot["num_episodes"][0])
        assert 8 <= steps <= 16 and 0 <= count <= 8  # two environments, eight steps, a reset after every end
        assert 1 <= slot["version"][0] <= self.board.version
        assert slot["statistics"][0] == slot["statistics"][REWARD_MOMENTS] == steps
        assert np.isfinite(slot["statistics"]).all() and np.isfinite(slot["values"]).all()
        assert (slot["episodes"][:count, 1] > 0).all()
        model = self.plan.model
        model.gradients.copy_(model.gradients.new_tensor(slot["gradient"]))
        named = {name: parameter.grad for name, parameter in model.network.named_parameters()}
        for name, gradient in named.items():
            assert gradient is not None and gradient.isfinite().all() and gradient.abs().max() > 0, name
        bias = named["policy_head.bias"]
        assert bias is not None and abs(float(bias.sum())) < 1e-6, "the gradients of two logits cancel out"

    def kill(self, index: int) -> None:
        pid = wait_until(lambda: self.turn() or self.engine.pid(f"actor-{index}"), f"actor {index} runs")
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.engine.close(0.0)
        self.ring.close()
        self.world.close()


@pytest.fixture
def bench(tmp_path: Path, shm_dir: Path) -> Iterator[Bench]:
    made = Bench(create_session(str(shm_dir)), tmp_path)
    yield made
    made.close()


def test_no_half_gradient_is_ever_shown(bench: Bench) -> None:
    draw = random.Random(0)
    for kill in range(NUM_KILLS):
        index = kill % NUM_ACTORS
        enough = bench.num_read[index] + draw.randrange(1, 12)

        def has_read(index: int = index, enough: int = enough) -> bool:
            bench.turn()
            return bench.num_read[index] >= enough

        wait_until(has_read, f"actor {index} brought gradients")
        bench.kill(index)
        wait_until(lambda kill=kill: bench.turn() or bench.deaths == kill + 1, "it is dead")  # type: ignore[misc]
    assert min(bench.num_read) >= NUM_KILLS and bench.deaths == NUM_KILLS


def test_killed_actors_are_replaced_while_the_others_go_on(runs: Runs) -> None:
    run = runs.train("a3c", **{"supervision.hang_timeout_s": 600})  # suspended roles do not count as hung
    for name in ("actor-0", "actor-1"):
        run.until_acting(int(name[-1]))
        pid = run.kill(name)
        run.until_learning()
        assert run.pid(name, besides=pid)
        run.until_acting(int(name[-1]))
    run.learns_while_stopped("actor-0")
    summary = run.stop()
    assert summary["restarts"] == 2 and summary["dropped"] == 0


def test_a_killed_learner_goes_on_from_its_checkpoint(runs: Runs) -> None:
    run = runs.train("a3c", **{"run.checkpoint_interval_s": 0.2, "actor.slots": 4})
    run.until(lambda: list((run.run_dir / "checkpoints").glob("step_*")), "there is a checkpoint")
    run.until_learning()
    actors = [run.pid("actor-0"), run.pid("actor-1")]
    pid = run.kill("learner")
    assert run.pid("learner", besides=pid)
    run.until(lambda: "the learner resumes from step_" in run.text(), "the learner is restored")
    run.until_learning()
    run.until_acting(0)
    assert [run.pid("actor-0"), run.pid("actor-1")] == actors
    versions = [row["version"] for row in run.rows()]
    assert versions == sorted(versions)
    summary = run.stop()
    assert summary["restarts"] == 1 and summary["dropped"] >= 1, "gradients of the lost weights were under way"
    assert summary["dropped"] <= 2 * 4 + 2, "those in the ring, and one more of each actor"
