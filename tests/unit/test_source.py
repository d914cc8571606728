"""The queue source: which trajectories form a batch, and which are counted, dropped and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from echelon.config import TrainConfig, replace
from echelon.errors import DivergedError
from echelon.roles.plan.layouts import window
from echelon.roles.queue_source import QueueSource
from echelon.roles.source import Counters
from echelon.roles.stopping import RETURN_WINDOW
from echelon.schema import Spaces, TrajectorySchema
from echelon.transport.shared_memory import SlotRing

T, K = 3, 2
OBSERVATION = gym.spaces.Dict({"eye": gym.spaces.Box(-9.0, 9.0, (2,)), "count": gym.spaces.Discrete(9)})
SPACES = Spaces(OBSERVATION, gym.spaces.Discrete(2))


class Scene:
    """A queue source, and a ring into which the test writes the trajectories of every actor."""

    def __init__(self, folder: Path, num_actors: int, max_lag: int | None, batch: int = 0, slots: int = 4) -> None:
        config = replace(
            TrainConfig(),
            **{"actor.num_actors": num_actors, "actor.envs": K, "actor.trajectory": T, "actor.slots": slots},
            **{"learner.max_lag": max_lag, "learner.batch": batch},
        )
        schema = TrajectorySchema(SPACES, T, K, ((4,),))
        self.ring = SlotRing(folder, schema, num_actors, window(config))
        self.source = QueueSource(config, schema, self.ring, torch.device("cpu"))
        self.source.admit()
        self.written = 0

    def write(self, actor: int, version: Any = 1, **rows: Any) -> int:
        """Commits a trajectory whose every reward is its number; `rows` replace fields."""
        assert self.ring.may_begin(actor), f"actor {actor} is not admitted"
        self.written += 1
        views = self.ring.writable(actor)
        for view in views.values():
            view.fill(0)
        views["reward"].fill(self.written)
        views["valid"].fill(True)
        views["version"][...] = version
        views["state.0"].fill(self.written)
        for name, value in rows.items():
            views[name.replace("__", ".")][...] = value
        self.ring.commit(actor)
        return self.written

    def take(self, version: int = 1) -> list[int] | None:
        """Returns the trajectories of the next batch in order; checks that each column belongs to one of them."""
        batch = self.source.take(version)
        if batch is None:
            return None
        numbers = batch.reward[0, ::K].to(torch.int64).tolist()
        for position, number in enumerate(numbers):
            lanes = slice(position * K, (position + 1) * K)
            assert bool((batch.reward[:, lanes] == number).all()) and bool((batch.state[0][lanes] == number).all())
        self.lanes = batch.lanes.tolist()
        return [int(number) for number in numbers]


def test_lock_step_waits_for_every_actor_and_keeps_their_order(tmp_path: Path) -> None:
    scene = Scene(tmp_path, num_actors=3, max_lag=0, batch=6)
    late_first = [scene.write(2), scene.write(2), scene.write(0), scene.write(1), scene.write(0)]
    assert scene.take() is None, "actor 1 has committed one of two"
    late_first.append(scene.write(1))
    assert scene.take() == [3, 5, 4, 6, 1, 2]
    assert scene.lanes == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]
    assert scene.take() is None


def test_lock_step_admits_nobody_before_the_weights_are_published(tmp_path: Path) -> None:
    scene = Scene(tmp_path, num_actors=2, max_lag=0)
    scene.write(0)
    assert not scene.ring.may_begin(0) and scene.ring.may_begin(1)
    scene.write(1)
    assert scene.take() == [1, 2]
    assert not scene.ring.may_begin(0) and not scene.ring.may_begin(1)
    scene.source.admit()
    assert scene.ring.may_begin(0) and scene.ring.may_begin(1)


@pytest.mark.parametrize(("max_lag", "ahead"), [(1, 2), (3, 4), (None, 4)])
def test_an_actor_may_run_ahead_by_the_lag_and_no_further(tmp_path: Path, max_lag: int | None, ahead: int) -> None:
    scene = Scene(tmp_path, num_actors=1, max_lag=max_lag)
    for _ in range(ahead):
        scene.write(0)
    assert not scene.ring.may_begin(0)
    assert scene.take() == [1]
    assert scene.ring.may_begin(0) == (max_lag is None), "unbounded: the slot is free; bounded: only when published"
    scene.source.admit()
    assert scene.ring.may_begin(0)


def test_without_lock_step_whoever_is_ready_is_taken_in_turns(tmp_path: Path) -> None:
    scene = Scene(tmp_path, num_actors=3, max_lag=None, batch=2)
    for actor in (0, 0, 0, 0, 2):
        scene.write(actor)
    assert scene.take() == [1, 5] and scene.lanes == [0, 1, 4, 5], "the silent actor 1 blocks nobody"
    scene.write(1)
    assert scene.take() == [2, 6], "the turn goes on after the last one taken"
    scene.write(2)
    assert scene.take() == [7, 3]
    assert scene.take() is None, "one is not a batch"
    scene.write(0)
    assert scene.take() == [4, 8] and scene.lanes == [0, 1, 0, 1]


def test_within_a_bound_every_actor_brings_its_share_unless_one_stalls(tmp_path: Path) -> None:
    scene = Scene(tmp_path, num_actors=2, max_lag=1)
    fast = [scene.write(0), scene.write(0)]
    assert scene.take() is None, "two are ready, but actor 1 may take its time"
    slow = scene.write(1)
    assert scene.take() == [fast[0], slow]
    scene.source.admit()
    scene.write(0)
    scene.source.patience_s = 0.0
    assert scene.take() is None, "the wait for actor 1 begins"
    assert scene.take() is not None, "it has stalled: the others continue without it"


def test_what_comes_too_late_is_dropped_counted_and_the_actor_admitted_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, num_actors=2, max_lag=1)
    scene.write(0, version=3)
    scene.write(0, version=3)
    scene.write(1, version=4)
    assert not scene.ring.may_begin(0)
    assert scene.take(version=5) is None
    assert scene.source.counters.dropped == 2 and scene.source.counters.env_steps == 0
    assert scene.ring.may_begin(0), "otherwise a stalled actor would wait forever"
    scene.write(0, version=5)
    assert scene.take(version=5) == [4, 3]
    assert scene.source.counters.lag_max == 1 and scene.source.counters.dropped == 2


def test_lag_is_measured_on_valid_steps_only(tmp_path: Path) -> None:
    scene = Scene(tmp_path, num_actors=2, max_lag=None)
    valid = np.array([[True, True], [True, False], [False, False]])
    scene.write(0, version=10, valid=valid)
    scene.write(1, version=np.array([7, 8, 9]))  # weights may change inside a trajectory
    assert scene.take(version=10) == [1, 2]
    counters = scene.source.counters
    assert counters.env_steps == 3 + 6
    assert counters.lag_sum == 2 * 3 + 2 * 2 + 2 * 1 and counters.lag_max == 3
    assert counters.lag_mean == pytest.approx(12 / 9)
    assert scene.source.fresh_lag == [(pytest.approx(12 / 9), 3)]


def test_episodes_are_counted_and_their_returns_kept_for_a_hundred(tmp_path: Path) -> None:
    scene = Scene(tmp_path, num_actors=1, max_lag=None)
    for i in range(RETURN_WINDOW):
        length, value = np.zeros((T, K)), np.zeros((T, K))
        length[0, 1], value[0, 1] = i + 1, -i
        length[2, 0], value[2, 0] = 7, 0.0  # a return of 0 counts, too
        scene.write(0, episode_length=length, episode_return=value)
        scene.take()
    counters = scene.source.counters
    assert counters.episodes == 2 * RETURN_WINDOW and counters.return_max == 0.0
    newest = [number for i in range(50, 100) for number in (-float(i), 0.0)]
    assert list(counters.returns) == newest
    assert counters.return_mean == pytest.approx(np.mean(newest))
    assert list(counters.lengths)[-2:] == [100, 7]


def test_counters_travel() -> None:
    one = Counters(env_steps=5, lag_sum=2.5, return_max=-1.0)
    one.returns.extend([1.0, 2.0])
    other = Counters()
    other.load_state_dict(one.state_dict())
    assert other == one and other.returns.maxlen == RETURN_WINDOW
    assert Counters().return_mean is None and Counters().lag_mean == 0.0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", ["reward", "observation__eye"])
def test_numbers_that_are_none_are_refused_and_traced(tmp_path: Path, field: str, value: float) -> None:
    scene = Scene(tmp_path, num_actors=2, max_lag=None)
    scene.write(1)
    rows = np.zeros((T, K)) if field == "reward" else np.zeros((T + 1, K, 2))
    rows[2, 1] = value
    scene.write(0)
    scene.write(0)
    valid = np.ones((T, K), np.bool_)
    valid[0, 1] = False  # a reset, which is no step
    scene.write(1, valid=valid, **{field: rows})
    scene.take()
    with pytest.raises(DivergedError) as caught:
        scene.take()
    message = str(caught.value)
    name, step = ("reward", 2) if field == "reward" else ("observation.eye[0]", 1)  # counted from 1
    assert f"{name} is {value} at step {step} of a trajectory of actor 1, environment 1 (seed " in message
    assert "finite" in message and "index" not in message


def test_huge_numbers_are_numbers(tmp_path: Path) -> None:
    scene = Scene(tmp_path, num_actors=1, max_lag=None)
    rows = np.full((T + 1, K, 2), np.finfo(np.float32).max)
    rows[1] *= -1
    scene.write(0, observation__eye=rows)
    assert scene.take() == [1]


def test_a_batch_holds_what_was_written_with_the_last_row_beside(tmp_path: Path) -> None:
    scene = Scene(tmp_path, num_actors=2, max_lag=0)
    draw = np.random.default_rng(0)
    written = []
    for actor in (0, 1):
        rows = {
            "observation__eye": draw.normal(size=(T + 1, K, 2)).astype(np.float32),
            "observation__count": draw.integers(9, size=(T + 1, K)),
            "first": draw.random((T + 1, K)) < 0.5,
            "action": draw.integers(2, size=(T, K)),
            "log_prob": draw.normal(size=(T, K)).astype(np.float32),
            "reward": draw.normal(size=(T, K)).astype(np.float32),
            "terminated": draw.random((T, K)) < 0.5,
            "truncated": draw.random((T, K)) < 0.5,
            "valid": draw.random((T, K)) < 0.5,
        }
        scene.write(actor, **rows)
        written.append(rows)
    batch = scene.source.take(1)
    assert batch is not None
    columns = {name: np.concatenate([rows[name] for rows in written], 1) for name in written[0]}
    np.testing.assert_array_equal(batch.observation["eye"], columns.pop("observation__eye"))
    np.testing.assert_array_equal(batch.observation["count"], columns.pop("observation__count"))
    for name, column in columns.items():
        np.testing.assert_array_equal(getattr(batch, name), column, err_msg=name)
