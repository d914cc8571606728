"""The choice of `acting.mode=auto`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import toy_envs as toy
from echelon.config import replace as changed
from echelon.errors import ConfigError
from echelon.roles.context import Context
from echelon.roles.plan import sizing
from echelon.roles.plan.choice import choose_acting
from echelon.roles.plan.findings import PREPARED, Prepared
from echelon.roles.plan.sizing import Preparation
from stage import Stage

AUTO = {"acting.mode": "auto", "actor.envs": 4, "acting.groups": 2, "engine": "local"}


def prepared(stage: Stage, context: Context | None = None) -> Prepared:
    context = context or stage.context
    role = Preparation(context.train, context.session, "", 0, context.spaces)
    role.step(0.0)
    return Prepared.read(context.session / PREPARED)


@pytest.mark.parametrize("mode", ["local", "central"])
def test_a_configured_mode_is_kept(make_stage: Callable[..., Stage], mode: str) -> None:
    stage = make_stage(**{**AUTO, "acting.mode": mode})
    assert choose_acting(stage.context, prepared(stage)).mode == mode


def test_one_process_acts_locally(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(**{**AUTO, "engine": "inline"})
    found = choose_acting(stage.context, prepared(stage))
    assert found.mode == "local" and "one process" in found.reason


def test_actors_that_compute_initial_priorities_act_locally(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(name="apex-dqn", **{**AUTO, "replay.capacity": 10_000})
    found = choose_acting(stage.context, prepared(stage))
    assert found.mode == "local" and "initial priorities" in found.reason
    context = replace(stage.context, train=changed(stage.context.train, **{"acting.value": True}))
    with pytest.raises(ConfigError, match=r"acting\.value=true, but the networks of apex-dqn have action values"):
        choose_acting(context, prepared(stage))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"acting.groups": 3}, "acting.groups=3 does not divide"),
        ({"acting.servers": 9}, "acting.servers=9 exceeds"),
    ],
)
def test_impossible_settings_of_central_acting_are_refused_whatever_would_be_chosen(
    make_stage: Callable[..., Stage], fields: dict[str, Any], message: str
) -> None:
    stage = make_stage(**AUTO)
    context = replace(stage.context, train=changed(stage.context.train, **fields))
    with pytest.raises(ConfigError, match=message):
        choose_acting(context, prepared(stage, context))


def test_without_a_gpu_actors_act_locally(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage("CartPole-v1", **AUTO, **{"acting.device": "cpu"})
    found = prepared(stage)
    assert found.act_s is None
    assert choose_acting(stage.context, found).mode == "local"


def test_a_reproducible_run_acts_locally_whatever_a_gpu_would_gain(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage("CartPole-v1", **AUTO, **{"learner.max_lag": 0, "learner.device": "cpu"})
    found = choose_acting(stage.context, replace(prepared(stage), act_s=1.0))
    assert found.mode == "local" and "reproducible" in found.reason


@pytest.mark.parametrize("core", ["none", "gru"])
@pytest.mark.parametrize("env", [toy.CounterEnv, toy.TreeEnv, toy.make_tree_vector, toy.MaskedEnv])
def test_acting_is_timed_for_any_observation_if_a_gpu_could_serve(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, env: Any, core: str
) -> None:
    monkeypatch.setattr(sizing, "server_device", lambda train, num_parameters, index: "cuda:0")
    found = prepared(make_stage(env, **AUTO, **{"network.core": core}))
    assert found.act_s is not None and 0.0 < found.act_s < 1.0


@pytest.mark.parametrize(("act_s", "mode"), [(0.5e-3, "local"), (2e-3, "central")])
def test_a_server_on_a_gpu_is_for_networks_that_keep_an_actor_busy(
    make_stage: Callable[..., Stage], act_s: float, mode: str
) -> None:
    stage = make_stage("CartPole-v1", **AUTO)
    found = choose_acting(stage.context, replace(prepared(stage), act_s=act_s))
    assert found.mode == mode and "4 environments" in found.reason
