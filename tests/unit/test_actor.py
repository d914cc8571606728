"""The actor writes exactly what its environments returned; also with learners that read it, all in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import toy_envs as toy
from echelon.errors import DivergedError, EnvError
from stage import Noted, Stage, foretold, joined


@pytest.mark.parametrize("truncate", [False, True], ids=["terminating", "truncating"])
@pytest.mark.parametrize("trajectory", [1, 4, 5])
def test_the_stream_is_what_the_environments_did(
    make_stage: Callable[..., Stage], trajectory: int, truncate: bool
) -> None:
    kwargs = {"length": 3, "truncate": truncate}
    stage = make_stage(**{"actor.trajectory": trajectory, "actor.envs": 3, "env.kwargs": kwargs})
    actor = stage.actor()
    seeds = actor.seeds
    assert len(set(seeds)) == 3
    stream = joined(stage.collect(actor, 6))
    for k, seed in enumerate(seeds):
        expected = foretold(lambda: toy.CounterEnv(**kwargs), seed, stream["action"][:, k])
        for name, rows in expected.items():
            np.testing.assert_array_equal(stream[name][:, k], rows, err_msg=f"{name} of environment {k}")
    ended = stream["terminated"] | stream["truncated"]
    assert ended.any() and bool(stream["truncated"].any()) == truncate
    if len(stream["reward"]) > 4:
        final = stream["observation"][1:][ended]
        assert (final[:, 1] == 3).all(), "the row after an end is the true final observation"
        assert not stream["valid"][1:][ended[:-1]].any(), "and the step after it only resets"


def test_a_restarted_environment_begins_a_new_episode_without_an_end(make_stage: Callable[..., Stage]) -> None:
    log: dict[str, Any] = {"failures": 0}
    fields = {"env.on_error": "restart", "actor.envs": 1, "actor.trajectory": 3}
    stage = make_stage(lambda: toy.FragileEnv(log, fail_at=2), **fields)
    actor = stage.actor()
    log["failures"] = 1
    stream = joined(stage.collect(actor, 4))
    t = stream["observation"][:, 0, 1].astype(int).tolist()
    assert t == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert stream["valid"][:, 0].tolist() == [True, True, False, True, True, True, True, False, True, True, True, True]
    assert stream["first"][:, 0].tolist() == [True, False, False, True] + [False] * 4 + [True] + [False] * 4
    assert np.flatnonzero(stream["terminated"]).tolist() == [6, 11]
    assert stream["episode_length"][[6, 11], 0].tolist() == [4, 4]
    assert stream["episode_return"][[6, 11], 0].tolist() == [410.0, 810.0], "steps before the failure do not count"
    assert stream["reward"][2, 0] == 0.0
    stage.world.poll(0.0)
    assert len(stage.messages) == 1 and "actor 0: environment 0" in stage.messages[0]
    assert "the simulator burnt down" in stage.messages[0] and "its step 3" in stage.messages[0]


def test_an_environment_that_raises_ends_the_actor_with_its_name(make_stage: Callable[..., Stage]) -> None:
    log: dict[str, Any] = {"failures": 0}
    stage = make_stage(lambda: toy.FragileEnv(log, fail_at=2))
    actor = stage.actor()
    log["failures"] = 1
    with pytest.raises(EnvError, match=r"actor 0: environment 0 \(seed \d+\) raised RuntimeError: the simulator burnt"):
        stage.collect(actor, 1)


def test_steps_are_stamped_with_the_version_that_chose_them(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage()
    actor = stage.actor()
    (one,) = stage.collect(actor, 1)
    model = stage.plan.model
    model.network.get_parameter("policy_head.bias").data[1] = 100.0  # from now on action 1 is certain
    stage.board.publish(model.parts(), 2)
    (two,) = stage.collect(actor, 1)
    assert one["version"].tolist() == [1] * 4 and two["version"].tolist() == [2] * 4
    assert (two["action"] == 1).all() and np.abs(two["log_prob"]).max() < 1e-6
    assert not (one["log_prob"] > -0.1).any()


def test_an_actor_waits_until_it_is_admitted_and_ends_when_told(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage()
    actor = stage.actor()
    assert actor.step(0.0) is False and not stage.ring.num_ready(0)
    stage.ring.grant(0, 2)
    assert sum(actor.step(0.0) for _ in range(20)) == 8, "two trajectories of four steps, then it waits"
    assert stage.ring.num_ready(0) == 2
    stage.world.post("actor-0-0", "stop")
    deadline = time.monotonic() + 60.0
    while not actor.finished:
        actor.station._next_tick = 0.0
        actor.station.tick(time.perf_counter())
        actor.step(0.01)
        assert time.monotonic() < deadline


def test_actors_and_their_successors_have_seeds_of_their_own(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(**{"actor.num_actors": 2})
    first, second, successor = stage.actor(0), stage.actor(1), stage.actor(0, incarnation=1)
    seeds = first.seeds + second.seeds + successor.seeds
    assert len(set(seeds)) == 6
    (trajectory,) = stage.collect(successor, 1)
    assert trajectory["first"][0].all(), "a successor begins new episodes"


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_the_state_at_a_trajectorys_start_is_what_a_replay_gives(make_stage: Callable[..., Stage], core: str) -> None:
    stage = make_stage("CartPole-v1", **{"network.core": core, "network.core_size": 6, "actor.envs": 3})
    trajectories = stage.collect(stage.actor(), 12)
    network = stage.plan.model.network
    state = network.initial_state(3, "cpu")
    assert any(trajectory["first"][1:].any() for trajectory in trajectories), "episodes end on the way"
    with torch.no_grad():
        for trajectory in trajectories:
            for i, leaf in enumerate(state):
                np.testing.assert_allclose(trajectory[f"state.{i}"], leaf.numpy(), rtol=1e-4, atol=1e-5)
            for row, first in zip(trajectory["observation"][:-1], trajectory["first"][:-1], strict=True):
                state = network.act(torch.from_numpy(row), state, torch.from_numpy(first)).state


@pytest.mark.parametrize("core", ["none", "gru"])
@pytest.mark.parametrize("max_lag", [0, 1, None])
def test_the_learner_sees_the_actors_probabilities_and_bounds_their_lag(
    make_stage: Callable[..., Stage], max_lag: int | None, core: str
) -> None:
    fields = {"learner.max_lag": max_lag, "network.core": core, "network.core_size": 6, "actor.num_actors": 2}
    rule = {"algorithm.minibatches": 2, "algorithm.epochs": 1, "optimizer.learning_rate": 0.01}
    stage = make_stage("CartPole-v1", "ppo", **fields, **rule)
    learner, actors = stage.learner(), [stage.actor(0), stage.actor(1)]
    divergences = []
    while learner.counters.updates < 10:
        for actor in actors:
            while actor.step(0.0):  # until they reach their lag bound
                pass
        learner.account = account = Noted()
        if learner.step(0.0):
            divergences.append(abs(account.noted[0]["kl"]))  # before the batch updates the weights
    counters = learner.counters
    assert counters.updates == 10 and counters.dropped == 0 and learner.board.version == 12
    if max_lag == 0:
        assert max(divergences) < 1e-6 and counters.lag_max == 0
    elif max_lag == 1:
        assert counters.lag_max == 1 and max(divergences) > 1e-5
    else:
        assert 1 < counters.lag_max <= stage.context.train.actor.slots
    assert 10 * 2 * 2 * 4 * 0.8 < counters.env_steps <= 10 * 2 * 2 * 4


class PoisonEnv(toy.CounterEnv):
    """Returns `value` as reward or in the observation at step 3 of its first episode, in one environment only."""

    made = 0

    def __init__(self, chosen: int, where: str, value: float) -> None:
        super().__init__(length=50)
        self.is_chosen, self.where, self.value = PoisonEnv.made == chosen, where, value
        PoisonEnv.made += 1

    def step(self, action: Any) -> toy.Step:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.is_chosen and self.t == 3:
            if self.where == "reward":
                reward = self.value
            else:
                observation[1] = self.value
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("where", "step"), [("reward", 3), ("observation[1]", 3)])
def test_a_number_that_is_none_ends_the_run_with_who_where_and_when(
    make_stage: Callable[..., Stage], where: str, step: int, value: float
) -> None:
    PoisonEnv.made = -1  # the first one is made only to read its spaces
    kwargs = {
        "chosen": 3,
        "where": where.partition("[")[0],
        "value": value,
    }  # the second environment of the second actor
    stage = make_stage(PoisonEnv, **{"actor.num_actors": 2, "env.kwargs": kwargs})
    learner, actors = stage.learner(), [stage.actor(0), stage.actor(1)]
    with pytest.raises(DivergedError) as caught:
        for _ in range(20):
            for role in (*actors, learner):
                role.step(0.0)
    message = str(caught.value)
    assert f"{where} is {value} at step {step}" in message and "actor 1, environment 1" in message


def test_a_choice_that_the_space_does_not_have_is_the_environments_fault(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(toy.StrayEnv, **{"actor.envs": 2, "actor.trajectory": 4})
    actor = stage.actor()
    with pytest.raises(EnvError, match=r"environment 0 \(seed \d+\) observed 3; its observation space is 0 to 2"):
        stage.collect(actor, 1)
