"""Resumed runs restore their replay exactly, or start with an empty replay and report why."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import echelon
import toy_envs as toy
from echelon.config import TrainConfig, replace
from echelon.errors import ConfigError
from echelon.presets import REPLAY_PRESETS, preset
from echelon.replay.restore import DamagedSnapshot, read_header
from echelon.roles.learner import Learner
from echelon.roles.plan.parts import Plan
from echelon.roles.replay_source import ReplaySource
from echelon.runs.checkpoint import load_checkpoint
from stage import Stage

TOYS = Path(__file__).resolve().parents[1] / "learning" / "test_toys.py"
SMALL = {"network.hidden": (16,), "actor.num_actors": 2, "actor.envs": 2, "replay.checkpoint": True}
SMALL |= {"replay.min_size": 100, "replay.batch": 32, "replay.capacity": 400, "evaluation.episodes": 0}


def source_of(learner: Learner) -> ReplaySource:
    assert isinstance(learner.source, ReplaySource)
    return learner.source


class Resumed(Stage):
    """A stage in a new session that resumes the run of an earlier stage."""

    def __init__(self, folder: Path, past: Stage) -> None:
        folder.mkdir()
        super().__init__(folder, past.context.train)
        self.context = dataclasses.replace(self.context, run_dir=past.context.run_dir, generation=1)
        self.plan = Plan(self.context)
        self.told = self.plan.make()


@pytest.fixture
def stages() -> Iterator[list[Stage]]:
    found: list[Stage] = []
    yield found
    for stage in found:
        stage.close()


@pytest.mark.parametrize("name", REPLAY_PRESETS)
def test_a_restored_learner_draws_the_same_batches_and_learns_the_same(
    tmp_path: Path, name: str, stages: list[Stage]
) -> None:
    env = "CartPole-v1" if name == "mario" or "dqn" in name else "Pendulum-v1"
    fields: dict[str, Any] = {"engine": "inline", **SMALL, "acting.mode": "local", "stop.steps": 10**6}
    fields |= {"replay.samples_per_insert": 8.0}
    stages.append(stage := Stage(tmp_path, replace(preset(name, env), **fields)))
    learner, actors = stage.learner(), [stage.actor(0), stage.actor(1)]
    while source_of(learner).replay.size < 400 or learner.counters.updates < 150:  # the shards have wrapped around
        for role in (*actors, learner):  # the learner last, so that it has counted all their steps
            role.step(0.0)
    learner.record.checkpoint()
    stages.append(resumed := Resumed(tmp_path / "again", stage))
    again = resumed.learner()
    assert resumed.told == [f"replay: restored the 400 transitions of step_{learner.counters.env_steps:012d}"]
    ours, theirs = source_of(learner), source_of(again)
    assert theirs.limiter.state() == ours.limiter.state()
    assert theirs.state_dict() == ours.state_dict(), "the generator, and the largest priority"
    for _ in range(20):
        for limiter in (ours.limiter, theirs.limiter):
            limiter.note_sampled(0, -32)  # no actor inserts: let the learner sample nevertheless
        assert learner.step(0.0) and again.step(0.0)
        assert theirs.rng.bit_generator.state == ours.rng.bit_generator.state
    for name, tensor in learner.trainable.weights().items():
        assert torch.equal(tensor, again.trainable.weights()[name]), "batches, weights, updates: all the same"
    one, same = ours.replay.sample(100, 0.5, ours.rng), theirs.replay.sample(100, 0.5, theirs.rng)
    np.testing.assert_array_equal(one.keys.shard, same.keys.shard)
    np.testing.assert_array_equal(one.keys.number, same.keys.number)
    np.testing.assert_array_equal(one.weights, same.weights)


def test_a_checkpoint_counts_the_steps_of_all_transitions_in_its_snapshot(tmp_path: Path, stages: list[Stage]) -> None:
    fields: dict[str, Any] = {"engine": "inline", **SMALL, "acting.mode": "local", "stop.steps": 10**6}
    stages.append(stage := Stage(tmp_path, replace(preset("mario", "CartPole-v1"), **fields)))
    learner, actors = stage.learner(), [stage.actor(0), stage.actor(1)]
    for role in (*actors, learner, *actors, *actors):  # actors go on after the learner has counted their steps
        for _ in range(5):
            role.step(0.0)
    learner.record.checkpoint()
    (checkpoint,) = (stage.context.run_dir / "checkpoints").glob("step_*")
    (snapshot,) = (stage.context.run_dir / "replay").glob("step_*")
    steps = load_checkpoint(checkpoint)["counters"]["env_steps"]
    inserted = sum(read_header(snapshot)["limiter"]["inserted"])
    assert checkpoint.name == snapshot.name == f"step_{steps:012d}"
    assert 0 <= steps - inserted <= 2 * 2, "the newest transition of each environment is stored with its next step"


def chain(folder: Path, shm_dir: Path) -> TrainConfig:
    """Double Q-learning on a chain, which a network of this size fits exactly."""
    fields = {"env.id": f"{TOYS}:Chain", "engine": "local", "seed": 1, "stop.steps": 4_000, "shm_dir": str(shm_dir)}
    fields |= {"algorithm.epsilon_steps": 600, "algorithm.target_period": 50, "network.hidden": (32,)}
    fields |= {"optimizer.learning_rate": 5e-3, "replay.min_size": 200, "replay.batch": 64, "actor.envs": 4}
    fields |= {"replay.samples_per_insert": 8.0, "replay.capacity": 1_000, "replay.checkpoint": True}
    fields |= {"run.dir": str(folder / "run"), "evaluation.episodes": 0, "acting.mode": "local"}
    return replace(preset("dqn", "CartPole-v1"), **fields)


def test_a_run_of_processes_goes_on_learning_with_no_drop_in_return(tmp_path: Path, shm_dir: Path) -> None:
    config = chain(tmp_path, shm_dir)
    before = echelon.train(config, output=io.StringIO())
    assert echelon.evaluate(before.run_dir, episodes=5)["return_mean"] == 1.0
    steps, sampled = before.summary["env_steps"], before.summary["replay"]["sampled"]
    text = io.StringIO()
    after = echelon.resume(before.run_dir, steps=steps + 400, output=text)
    told = re.search(r"replay: restored the ([\d,]+) transitions of step_", text.getvalue())
    assert told is not None, text.getvalue()
    size = int(told[1].replace(",", ""))
    assert 900 <= size <= 1_000, "but for the few that the actor overwrote while they were saved"
    assert after.summary["replay"]["sampled"] >= sampled + 8 * 300, "it learns from the first steps on"
    assert after.summary["replay"]["samples_per_insert"] == pytest.approx(8.0, rel=0.01)
    assert echelon.evaluate(before.run_dir, episodes=5)["return_mean"] == 1.0


def short(folder: Path, shm_dir: Path, **changes: Any) -> echelon.RunResult:
    fields = {**SMALL, "engine": "inline", "run.dir": str(folder / "run"), "shm_dir": str(shm_dir), "stop.steps": 400}
    config = replace(preset("apex-dqn", "CartPole-v1"), **{**fields, "env.id": toy_env(), **changes})
    return echelon.train(config, output=io.StringIO())


def toy_env() -> str:
    return f"{toy.__file__}:CounterEnv"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_snapshot_is_told_and_the_run_goes_on_with_an_empty_replay(tmp_path: Path, shm_dir: Path) -> None:
    before = short(tmp_path, shm_dir)
    (snapshot,) = (before.run_dir / "replay").iterdir()
    flip(snapshot / "shard-1.rows")
    text = io.StringIO()
    after = echelon.resume(before.run_dir, steps=before.summary["env_steps"] + 300, output=text)
    assert f"snapshot {snapshot} is damaged: shard-1.rows does not match its checksum" in text.getvalue()
    assert "replay: starts empty, as there is no intact snapshot" in text.getvalue()
    assert after.summary["updates"] > before.summary["updates"] and after.summary["replay"]["inserted"] <= 400
    again = io.StringIO()
    echelon.resume(before.run_dir, steps=after.summary["env_steps"] + 50, output=again)
    assert "replay: restored the" in again.getvalue(), "the next checkpoint brought a whole one"


def test_an_older_snapshot_that_is_whole_is_taken_where_the_newest_is_not(tmp_path: Path, shm_dir: Path) -> None:
    before = short(tmp_path, shm_dir)
    (snapshot,) = (before.run_dir / "replay").iterdir()
    shutil.copytree(snapshot, snapshot.with_name("step_000000999999"))  # killed before it removed the older one
    flip(snapshot.with_name("step_000000999999") / "replay.json")
    text = io.StringIO()
    echelon.resume(before.run_dir, steps=before.summary["env_steps"] + 50, output=text)
    assert "step_000000999999" in text.getvalue()
    assert f"transitions of {snapshot.name}" in text.getvalue()


@pytest.mark.parametrize(
    ("section", "field", "value", "what"),
    [
        ("actor", "num_actors", 4, "has 2 shards, but this replay has 4"),
        ("replay", "capacity", 600, "capacity of a shard: 200 in the snapshot, 300 here"),
    ],
)
def test_a_snapshot_of_another_layout_is_refused_with_the_remedy(
    tmp_path: Path, shm_dir: Path, section: str, field: str, value: int, what: str
) -> None:
    before = short(tmp_path, shm_dir)
    file = before.run_dir / "config.json"
    record = json.loads(file.read_text())
    record["config"][section][field] = value
    file.write_text(json.dumps(record))
    steps = before.summary["env_steps"] + 300
    with pytest.raises(ConfigError, match=rf"{what}.*Resume with the actors.* or remove .*/replay to continue") as told:
        echelon.resume(before.run_dir, steps=steps, output=io.StringIO())
    assert not isinstance(told.value, DamagedSnapshot) and not list(shm_dir.iterdir())
    assert len(list((before.run_dir / "replay").iterdir())) == 1, "nothing is lost"
    shutil.rmtree(before.run_dir / "replay")
    assert echelon.resume(before.run_dir, steps=steps, output=io.StringIO()).summary["replay"]["inserted"] <= 500
