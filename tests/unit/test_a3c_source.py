"""The gradient source: which gradients it sums, counts, drops and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echelon.algorithms.a3c import SHOWN
from echelon.config import replace
from echelon.errors import DivergedError
from echelon.presets import preset
from echelon.roles.gradient_slots import GradientSchema
from echelon.roles.gradient_source import GradientSource
from echelon.roles.plan.layouts import window
from echelon.transport.shared_memory import SlotRing

SCHEMA = GradientSchema(num_parameters=32, num_statistics=3, max_episodes=5)


class Scene:
    """A gradient source, and a ring into which the test writes the gradients of every actor."""

    def __init__(self, folder: Path, num_actors: int = 2, batch: int = 1, max_lag: int | None = None) -> None:
        fields = {"actor.num_actors": num_actors, "learner.batch": batch, "learner.max_lag": max_lag}
        config = replace(preset("a3c", "CartPole-v1"), **fields, **{"actor.slots": 3})
        self.ring = SlotRing(folder, SCHEMA, num_actors, window(config))
        self.source = GradientSource(config, SCHEMA, self.ring, torch.device("cpu"))
        self.source.admit()

    def write(self, actor: int, gradient: Any, version: int = 1, episodes: Any = (), env_steps: int = 10) -> None:
        assert self.ring.may_begin(actor), f"actor {actor} is not admitted"
        slot = self.ring.writable(actor)
        slot["gradient"][...] = gradient
        slot["values"][...] = np.arange(len(SHOWN)) + actor
        slot["statistics"][...] = actor
        slot["version"][0], slot["env_steps"][0], slot["num_episodes"][0] = version, env_steps, len(episodes)
        slot["episodes"][: len(episodes), :2] = np.reshape(episodes, (-1, 2))
        self.ring.commit(actor)

    def close(self) -> None:
        self.source.close()


@pytest.fixture
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    made = Scene(tmp_path, **getattr(request, "param", {}))
    yield made
    made.close()


@pytest.mark.parametrize("scene", [{"batch": 3}], indirect=True)
@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 0), (0, 0, 1)])
def test_gradients_are_added_up_in_whatever_order_they_come(scene: Scene, order: tuple[int, ...]) -> None:
    given = {0: [1.0, 4.0], 1: [np.linspace(-1.0, 1.0, 32)]}
    for number, actor in enumerate(order):
        assert scene.source.take(1) is None, f"{number} of 3 are not enough"
        scene.write(actor, given[actor].pop(0))
    batch = scene.source.take(1)
    assert batch is not None and batch.num_gradients == 3
    np.testing.assert_allclose(batch.gradient.numpy(), 5.0 + np.linspace(-1.0, 1.0, 32), rtol=1e-6)
    np.testing.assert_allclose(batch.values.numpy(), np.arange(len(SHOWN)) + 1 / 3, rtol=1e-6)
    assert sorted(float(each[0]) for each in batch.statistics) == [0.0, 0.0, 1.0]
    assert scene.source.take(1) is None and scene.source.counters.env_steps == 30


def test_what_is_counted_comes_with_the_gradients(scene: Scene) -> None:
    scene.write(0, 1.0, version=2, env_steps=30, episodes=[(7.0, 7), (3.5, 4)])
    assert scene.source.take(2) is not None
    scene.write(1, 1.0, version=2, env_steps=10)
    assert scene.source.take(6) is not None
    counters = scene.source.counters
    assert (counters.env_steps, counters.episodes, counters.dropped) == (40, 2, 0)
    assert (list(counters.returns), list(counters.lengths), counters.return_max) == ([7.0, 3.5], [7, 4], 7.0)
    assert (counters.lag_mean, counters.lag_max) == (1.0, 4)
    assert scene.source.fresh_lag == [(0.0, 0), (4.0, 4)]


def test_a_batch_is_the_learners_own_and_slots_are_free_at_once(scene: Scene) -> None:
    scene.write(0, 1.0)
    first = scene.source.take(1)
    assert first is not None and scene.ring.released[0] == 1
    kept = first.gradient.clone()
    for _ in range(scene.ring.num_slots):
        scene.write(0, 9.0)
    torch.testing.assert_close(first.gradient, kept)


@pytest.mark.parametrize(("value", "text"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_a_gradient_that_is_lost_is_refused_with_its_actor(scene: Scene, value: float, text: str) -> None:
    gradient = np.ones(32, np.float32)
    gradient[[3, 17]] = value
    scene.write(0, 1.0)
    scene.write(1, gradient, version=5)
    assert scene.source.take(1) is not None
    with pytest.raises(
        DivergedError, match=rf"^2 of the 32 numbers of a gradient of actor 1 are .*{text}\).*version 5"
    ):
        scene.source.take(6)


def test_large_numbers_are_not_taken_for_lost_ones(scene: Scene) -> None:
    scene.write(0, np.float32(3e38))
    batch = scene.source.take(1)
    assert batch is not None and float(batch.gradient[0]) == pytest.approx(3e38)


def test_gradients_of_lost_weights_are_dropped_and_counted(tmp_path: Path) -> None:
    """After a killed learner restarts from a checkpoint, gradients at the lost weights are dropped."""
    before = Scene(tmp_path)
    before.write(0, 1.0, version=40)
    before.write(1, 2.0, version=41)
    before.write(1, 3.0, version=41)
    before.close()
    after = Scene(tmp_path)
    assert after.source.take(42) is None
    assert after.source.counters.dropped == 3 and after.source.counters.env_steps == 0
    after.write(0, 4.0, version=41)  # committed while the learner was dead
    after.write(1, 5.0, version=42)
    batch = after.source.take(42)
    assert batch is not None and float(batch.gradient[0]) == 5.0
    assert after.source.take(43) is None and after.source.counters.dropped == 4
    after.close()


@pytest.mark.parametrize("scene", [{"batch": 2, "max_lag": 1}], indirect=True)
def test_with_a_bound_every_actor_brings_its_share_and_what_is_late_is_dropped(scene: Scene) -> None:
    scene.write(0, 1.0)
    scene.write(0, 2.0)
    assert not scene.ring.may_begin(0) and scene.source.take(1) is None, "actor 1 is waited for"
    scene.write(1, 4.0)
    batch = scene.source.take(1)
    assert batch is not None and float(batch.gradient[0]) == 5.0
    assert not scene.ring.may_begin(0), "no actor is admitted before the new weights are published"
    scene.source.admit()
    assert scene.ring.may_begin(0)
    scene.write(1, 8.0, version=1)
    assert scene.source.take(3) is None, "both have version 1, and a lag of two is above the bound"
    assert scene.source.counters.dropped == 2 and scene.source.counters.lag_max == 0
