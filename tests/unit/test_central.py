"""Central acting in the actor: teams, their trajectories and requests, and recovery after a death."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import toy_envs as toy
from echelon.config import ActingConfig, replace
from echelon.errors import ConfigError, DivergedError, EnvError
from echelon.presets import preset
from echelon.roles.inference import Inference
from echelon.roles.plan import parts
from echelon.roles.plan.layouts import act_layout, num_groups
from stage import Noted, Stage, foretold, joined

CENTRAL = {"acting.mode": "central", "actor.envs": 4, "actor.num_actors": 1}


def question_counts(stage: Stage) -> list[int]:
    return [int(count) for count in stage.plan.act_board().asked]


@pytest.mark.parametrize("groups", [0, 1, 2, 4])
@pytest.mark.parametrize("trajectory", [1, 4, 5])
def test_the_stream_is_what_the_environments_did(
    make_stage: Callable[..., Stage], trajectory: int, groups: int
) -> None:
    stage = make_stage(**CENTRAL, **{"actor.trajectory": trajectory, "acting.groups": groups})
    actor, inference = stage.actor(), stage.inference()
    assert len(actor.teams) == (groups or 2)
    seeds = actor.seeds
    assert len(set(seeds)) == 4
    stream = joined(stage.collect(actor, 6, inference))
    for k, seed in enumerate(seeds):
        for name, rows in foretold(toy.CounterEnv, seed, stream["action"][:, k]).items():
            np.testing.assert_array_equal(stream[name][:, k], rows, err_msg=f"{name} of environment {k}")
    assert (stream["version"] == 1).all() and stream["log_prob"].max() < 0.0
    assert inference.server.num_requests == len(actor.teams) * len(stream["reward"])
    shares = inference.station.phases
    assert shares["act"] > 0.0 and shares["transfer"] > 0.0


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
def test_what_is_stored_is_what_a_replay_gives(make_stage: Callable[..., Stage], core: str) -> None:
    """Log-probabilities and initial recurrent states equal a replayed forward pass, even if the server is replaced."""
    fields = {"network.core": core, "network.core_size": 6, "acting.groups": 2}
    stage = make_stage("CartPole-v1", **CENTRAL, **fields)
    actor, network = stage.actor(), stage.plan.model.network
    trajectories = []
    for incarnation in range(3):
        trajectories += stage.collect(actor, 5, stage.inference(incarnation))
    assert any(trajectory["first"][1:].any() for trajectory in trajectories), "episodes end on the way"
    state = network.initial_state(4, "cpu")
    with torch.no_grad():
        for trajectory in trajectories:
            for i, leaf in enumerate(state):
                np.testing.assert_allclose(trajectory[f"state.{i}"], leaf.numpy(), rtol=1e-4, atol=1e-5)
            observation, first = (torch.from_numpy(trajectory[name][:-1]) for name in ("observation", "first"))
            output = network(observation, state, first)
            action = torch.from_numpy(trajectory["action"])
            log_prob = stage.plan.model.distribution.log_prob(output.params, action)
            np.testing.assert_allclose(trajectory["log_prob"], log_prob.numpy(), rtol=1e-4, atol=1e-5)
            state = output.state


def test_of_teams_that_differ_the_older_version_is_stored(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(**CENTRAL)
    actor, inference = stage.actor(), stage.inference()
    stage.ring.grant(0, 1)
    inference.server.batcher._max_seats = 1  # one request per round
    assert not actor.step(0.0) and question_counts(stage) == [1, 1], "both teams asked"
    for version in (2, 3):
        assert inference.step(0.0)
        stage.board.publish(stage.plan.model.parts(), version)
    while not stage.ring.num_ready(0):
        assert actor.step(0.0) or inference.step(0.0)
    assert stage.ring.readable(0)["version"].tolist() == [1, 3, 3, 3]


def test_a_team_asks_only_for_what_the_learner_admitted(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(**CENTRAL)
    actor, inference = stage.actor(), stage.inference()
    assert not actor.step(0.0) and question_counts(stage) == [0, 0]
    stage.ring.grant(0, 1)
    for _ in range(40):
        actor.step(0.0)
        inference.step(0.0)
    assert question_counts(stage) == [4, 4] and stage.ring.num_ready(0) == 1


def test_a_team_may_be_a_trajectory_ahead_of_the_other(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(**CENTRAL)
    actor, inference = stage.actor(), stage.inference()
    stage.ring.grant(0, 2)
    slow, fast = actor.teams
    assert not actor.step(0.0)
    while fast.trajectory == 0:
        inference.step(0.0)
        assert fast.page is not None and actor._advance(fast, fast.page)
    assert stage.ring.num_ready(0) == 0 and slow.t == 0, "a slot is complete when all teams have left it"
    assert actor.step(0.0) and fast.page is not None and fast.trajectory == 1
    while stage.ring.num_ready(0) < 2:
        assert actor.step(0.0) or inference.step(0.0)
    stream = joined([stage.ring.readable(0, ahead) for ahead in range(2)])
    for k, seed in enumerate(actor.seeds):
        for name, rows in foretold(toy.CounterEnv, seed, stream["action"][:, k]).items():
            np.testing.assert_array_equal(stream[name][:, k], rows, err_msg=f"{name} of environment {k}")


def test_the_successor_of_an_actor_that_died_asking_starts_clean(make_stage: Callable[..., Stage]) -> None:
    fields = {"network.core": "lstm", "network.core_size": 6, "acting.groups": 2}
    stage = make_stage("CartPole-v1", **CENTRAL, **fields)
    actor, inference = stage.actor(), stage.inference()
    stage.collect(actor, 3, inference)
    stage.ring.grant(0, 1)
    actor.step(0.0)
    asked = question_counts(stage)
    successor = stage.actor(0, incarnation=1)
    for _ in range(5):
        assert not successor.step(0.0)
    assert question_counts(stage) == asked, "it takes no seat before the pending request is answered"
    (trajectory,) = stage.collect(successor, 1, inference)
    assert trajectory["first"][0].all()
    assert not trajectory["state.0"].any() and not trajectory["state.1"].any()


def test_an_actor_that_waits_for_actions_is_seen_to_live(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(**CENTRAL)
    actor = stage.actor()
    stage.ring.grant(0, 1)
    before = actor.station.progress
    for _ in range(3):
        assert not actor.step(0.001)  # no server replies
    assert actor.station.progress >= before + 3 and actor.station.phases["wait"] > 0.0
    stage.inference().step(0.0)
    assert actor.step(0.0)


def test_an_actor_that_leaves_is_not_waited_for(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(**CENTRAL)
    actor, inference = stage.actor(), stage.inference()
    stage.collect(actor, 1, inference)
    board = stage.plan.act_board()
    assert board.incarnation.tolist() == [1, 1]
    stage.roles.remove(actor)
    actor.close()
    assert board.incarnation.tolist() == [0, 0]


def test_an_actor_needs_no_model(make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    stage = make_stage(**CENTRAL)
    inference = stage.inference()
    monkeypatch.setattr(parts, "Model", lambda *_, **__: pytest.fail("the actor built a model"))
    assert stage.collect(stage.actor(), 1, inference)


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("max_lag", [0, 1])
def test_the_learner_sees_the_servers_probabilities_and_bounds_the_lag(
    make_stage: Callable[..., Stage], max_lag: int, core: str
) -> None:
    fields = {"learner.max_lag": max_lag, "network.core": core, "network.core_size": 6}
    rule = {"algorithm.minibatches": 2, "algorithm.epochs": 1, "optimizer.learning_rate": 0.01}
    stage = make_stage("CartPole-v1", "ppo", **{**CENTRAL, "actor.num_actors": 2}, **fields, **rule)
    learner, inference, actors = stage.learner(), stage.inference(), [stage.actor(0), stage.actor(1)]
    divergences = []
    while learner.counters.updates < 10:
        while any([role.step(0.0) for role in (*actors, inference)]):  # until they reach their lag bound
            pass
        learner.account = account = Noted()
        if learner.step(0.0):
            divergences.append(abs(account.noted[0]["kl"]))  # before the batch updates the weights
    assert learner.counters.dropped == 0 and learner.counters.lag_max == max_lag
    if max_lag == 0:
        assert max(divergences) < 1e-6
    else:
        assert max(divergences) > 1e-5


def test_environments_keep_their_numbers_in_what_is_told(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(toy.StrayEnv, **CENTRAL)
    actor, inference = stage.actor(), stage.inference()
    actor.teams.reverse()  # the second team encounters it first
    with pytest.raises(EnvError, match=r"environment 2 \(seed \d+\) observed 3"):
        stage.collect(actor, 1, inference)


def test_actions_that_are_no_numbers_blame_the_weights(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(lambda: toy.ForceEnv("float32"), **CENTRAL)
    actor, inference = stage.actor(), stage.inference()
    stage.plan.model.network.get_parameter("policy_head.bias").data[0] = np.nan
    stage.board.publish(stage.plan.model.parts(), 2)
    with pytest.raises(DivergedError, match="the policy of version 2 chose the action"):
        stage.collect(actor, 1, inference)


@pytest.mark.parametrize(("envs", "groups", "found"), [(8, 0, 2), (7, 0, 1), (6, 3, 3), (6, 1, 1)])
def test_groups(envs: int, groups: int, found: int) -> None:
    config = replace(preset("impala", "CartPole-v1"), **{"actor.envs": envs, "acting.groups": groups})
    assert num_groups(replace(config, **{"acting.mode": "central"})) == found
    assert num_groups(replace(config, **{"acting.mode": "local"})) == 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"acting.groups": 3}, r"acting.groups=3 does not divide the 4 environments of an actor"),
    ({"acting.servers": 2}, r"acting.servers=2 exceeds actor.num_actors=1"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_what_cannot_work_is_refused(make_stage: Callable[..., Stage], fields: dict[str, Any], message: str) -> None:
    context = make_stage(**CENTRAL).context
    with pytest.raises(ConfigError, match=message):
        act_layout(dataclasses.replace(context, train=replace(context.train, **fields)))


@pytest.mark.parametrize("field", ["servers", "groups", "max_batch", "max_wait_us"])
def test_numbers_below_their_least_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"acting.{field}=-1 must be at least"):
        ActingConfig(**{field: -1})


def test_several_servers_share_the_actors(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(**{**CENTRAL, "acting.servers": 2, "actor.num_actors": 2})
    servers = [
        Inference(dataclasses.replace(stage.context, name=f"inference-{index}", index=index)) for index in range(2)
    ]
    stage.roles += servers
    actors = [stage.actor(0), stage.actor(1)]
    assert stage.collect(actors[0], 1, servers[0]) and stage.collect(actors[1], 1, servers[1])
    assert [server.server.num_requests for server in servers] == [8, 8]
