"""The choice of `acting.mode=auto`: the performance model with given measurements, and the calibration."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import toy_envs as toy
from echelon.config import replace as changed
from echelon.engines.inline import InlineEngine
from echelon.engines.local import LocalEngine
from echelon.errors import ConfigError
from echelon.presets import preset
from echelon.roles.calibration import Calibration, Clock
from echelon.roles.context import Context
from echelon.roles.plan import choice
from echelon.roles.plan.choice import (
    ASK_S,
    COPY_BYTES_PER_S,
    MARGIN,
    ROUND_S,
    SEAT_S,
    TICK_S,
    WAKE_S,
    Forecast,
    Shape,
    forecast,
)
from echelon.roles.plan.findings import CALIBRATED, PREPARED, CallCost, Measured, Prepared
from echelon.roles.plan.layouts import round_rows
from echelon.roles.plan.sizing import Preparation
from echelon.roles.plan.stages import Stages
from running import DEADLINE_S
from stage import Stage
from unruly import SlowEnv

FREE = CallCost(0.0, 0.0)


def busy(ms: float) -> CallCost:
    """The cost of `ms` milliseconds of CPU work."""
    return CallCost(ms / 1e3, ms / 1e3)


def asleep(ms: float) -> CallCost:
    """The cost of `ms` milliseconds that are almost entirely sleep."""
    return CallCost(ms / 1e3, ms / 1e6)


def shape(cores: int = 2, actors: int = 2, envs: int = 32, groups: int = 2, weights_bytes: int = 40_000) -> Shape:
    rows = envs // groups * actors
    return Shape(cores, actors, envs, groups, 1, rows, actors * envs * 20, weights_bytes)


# CartPole with 64 x 64 units: the environments take most of the time.
CARTPOLE = Measured(whole=busy(0.22), part=busy(0.11), act=busy(0.08), round=busy(0.08), learn=busy(0.002))


@pytest.mark.parametrize("noise", [0.3, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("of", ["whole", "act", "round", "learn"])
@pytest.mark.parametrize("cores", [1, 2, 4, 16])
def test_a_small_network_on_the_cpu_acts_locally_however_badly_it_was_measured(
    noise: float, of: str, cores: int
) -> None:
    measured = replace(CARTPOLE, **{of: getattr(CARTPOLE, of).times(noise)})
    if of == "whole":
        measured = replace(measured, part=CARTPOLE.part.times(noise))
    if of == "act":  # measured alternately with the rounds
        measured = replace(measured, round=CARTPOLE.round.times(noise))
    found = forecast(shape(cores=cores, actors=cores), measured)
    assert found.mode == "local"


def test_environments_that_sleep_leave_the_two_alike_and_local_acting_is_taken() -> None:
    found = forecast(shape(envs=8), replace(CARTPOLE, whole=asleep(40), part=asleep(20)))
    assert found.central == pytest.approx(found.local, rel=0.01)
    assert found.mode == "local"


def test_a_slow_policy_is_hidden_behind_environments_that_sleep() -> None:
    """One half of the environments sleeps while the actions of the other half are computed, and 16 cores are idle."""
    measured = Measured(asleep(40), asleep(20), act=busy(20), round=busy(15), learn=FREE)
    found = forecast(shape(cores=16, envs=8), measured)
    assert found.local == pytest.approx(2 * 8 / 0.060, rel=0.01)
    assert found.central == pytest.approx(2 * 8 / 0.040, rel=0.01)
    assert found.mode == "central"


def test_environments_that_step_together_lose_by_being_parted() -> None:
    """The step of a vector environment takes equally long for half as many environments."""
    measured = Measured(asleep(5), asleep(5), act=busy(0.1), round=busy(0.1), learn=FREE)
    found = forecast(shape(envs=8), measured)
    assert found.central == pytest.approx(found.local / 2, rel=0.05)


def test_a_large_network_acts_on_the_gpu() -> None:
    measured = Measured(busy(0.22), busy(0.11), act=busy(20), round=CallCost(0.8e-3, 0.4e-3), learn=FREE)
    found = forecast(shape(cores=16, actors=8, weights_bytes=80_000_000), measured)
    assert found.central > 5 * found.local
    assert found.mode == "central"


def test_a_learner_that_is_the_limit_leaves_nothing_to_gain() -> None:
    learn = CallCost(wall_s=1e-3, cpu_s=0.0)
    measured = Measured(busy(0.22), busy(0.11), act=busy(20), round=CallCost(0.8e-3, 0.4e-3), learn=learn)
    found = forecast(shape(cores=16, actors=8), measured)
    assert found == Forecast(1000.0, 1000.0)
    assert found.mode == "local"


def test_local_acting_is_bound_by_processors_or_by_the_actor() -> None:
    measured = Measured(CallCost(10e-3, 4e-3), FREE, act=busy(2), round=FREE, learn=CallCost(1e-5, 2e-4))
    two = shape(envs=10, weights_bytes=0)
    per_step_s = (4e-3 + 2e-3 + TICK_S) / 10 + 2e-4
    assert forecast(replace(two, cores=1), measured).local == pytest.approx(1 / per_step_s)
    assert forecast(replace(two, cores=8), measured).local == pytest.approx(2 * 10 / (12e-3 + TICK_S))


def test_central_acting_is_bound_by_processors_the_actor_or_the_server() -> None:
    measured = Measured(FREE, CallCost(5e-3, 2e-3), act=FREE, round=busy(3), learn=FREE)
    many = shape(cores=64, actors=4, envs=10, weights_bytes=0)  # rounds of 20 rows, 4 requests
    beside_s = ROUND_S + 4 * SEAT_S
    turn_s = 5e-3 + TICK_S + ASK_S
    assert forecast(many, measured).central == pytest.approx(4 * 10 / (2 * turn_s))
    late = forecast(many, replace(measured, round=busy(6)))  # stepping the other group ends before the reply arrives
    assert late.central == pytest.approx(min(4 * 10 / (turn_s + 6e-3 + beside_s + 2 * WAKE_S), 20 / (6e-3 + beside_s)))
    slow = forecast(many, replace(measured, round=busy(30)))
    assert slow.central == pytest.approx(20 / (30e-3 + beside_s))
    single = replace(many, groups=1, round_rows=40)
    assert forecast(single, measured).central == pytest.approx(4 * 10 / (turn_s + 3e-3 + beside_s + 2 * WAKE_S))
    per_step_s = 2 * (2e-3 + TICK_S + ASK_S) / 10 + (3e-3 + beside_s) / 20
    assert forecast(replace(many, cores=1), measured).central == pytest.approx(1 / per_step_s)


def test_every_actor_copies_the_weights_but_of_central_acting_only_the_server() -> None:
    weights_bytes = 80_000_000
    light, heavy = shape(actors=8, weights_bytes=0), shape(actors=8, weights_bytes=weights_bytes)
    copy_s = weights_bytes / COPY_BYTES_PER_S / (8 * 32 * 20)
    before, after = forecast(light, CARTPOLE), forecast(heavy, CARTPOLE)
    assert 2 / after.local - 2 / before.local == pytest.approx(8 * copy_s)
    assert 2 / after.central - 2 / before.central == pytest.approx(copy_s)


@pytest.mark.parametrize(("gain", "mode"), [(-0.5, "local"), (0.0, "local"), (MARGIN, "local"), (0.2, "central")])
def test_central_acting_must_be_ahead_by_a_margin(gain: float, mode: str) -> None:
    assert Forecast(1000.0, 1000.0 * (1 + gain)).mode == mode


def test_the_reason_names_the_figures() -> None:
    measured = Measured(busy(0.22), busy(0.11), act=busy(20), round=CallCost(0.8e-3, 0.4e-3), learn=FREE)
    reason = choice.reason_text(shape(), measured, Forecast(1234.4, 98765.0))
    assert reason.startswith("about 98,765 steps/s against 1,234 with local acting: 32 environments step in 0.22 ms")
    assert "in 20 ms" in reason and "those of 32 environments in 0.8 ms" in reason and "\n" not in reason
    assert choice.reason_text(shape(), measured, Forecast(10.0, 1.0)).startswith(
        "about 10 steps/s against 1 with central"
    )


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({}, 32),
        ({"acting.batch": False}, 16),
        ({"acting.groups": 1}, 64),
        ({"acting.servers": 2}, 16),
        ({"actor.num_actors": 5, "acting.servers": 2}, 48),
        ({"actor.num_actors": 5, "acting.max_batch": 40}, 32),
    ],
)
def test_a_round_has_the_rows_that_its_rule_lets_in(fields: dict[str, Any], rows: int) -> None:
    assert (
        round_rows(changed(preset("impala", "CartPole-v1"), **{"acting.mode": "central", "actor.envs": 32, **fields}))
        == rows
    )


def test_a_clock_tells_sleep_from_work_and_forgets_what_others_did() -> None:
    clock = Clock()
    clock._costs = [CallCost(2.0, 1.0)] * 3 + [CallCost(9.0, 1.0), CallCost(9.0, 5.0)]
    assert clock.cost() == CallCost(2.0, 1.0)


# The calibration.

AUTO = {
    "acting.mode": "central",
    "actor.envs": 4,
    "acting.groups": 2,
}  # the calibration is configured with central acting


def calibrate(stage: Stage) -> Measured:
    role = Calibration(stage.context)
    stage.roles.append(role)
    assert role.step(0.0) and role.finished
    return Measured.read(stage.context.session / CALIBRATED)


@pytest.mark.parametrize("core", ["none", "gru"])
@pytest.mark.parametrize("env", [toy.CounterEnv, toy.TreeEnv, toy.make_tree_vector, toy.MaskedEnv])
def test_a_calibration_measures_everything(make_stage: Callable[..., Stage], env: Any, core: str) -> None:
    measured = calibrate(make_stage(env, **AUTO, **{"network.core": core}))
    for cost in (measured.whole, measured.part, measured.act, measured.round, measured.learn):
        assert cost.wall_s > 0.0 and cost.cpu_s > 0.0


@pytest.mark.parametrize(("name", "env"), [("dqn", "CartPole-v1"), ("sac", "Pendulum-v1")])
def test_rules_that_replay_are_calibrated_by_how_often_a_step_is_learned_from(
    make_stage: Callable[..., Stage], name: str, env: str
) -> None:
    stage = make_stage(env, name, **AUTO, **{"replay.capacity": 10_000})
    measured = calibrate(stage)
    assert measured.act.cpu_s > 0.0 and measured.learn.cpu_s > 0.0
    config = stage.context.train
    often, seldom = (Shape.of(changed(config, **{"replay.samples_per_insert": n}), 2, 10**6) for n in (64.0, 8.0))
    assert often.version_steps == config.replay.batch / 64 == seldom.version_steps / 8


def test_sleep_costs_time_and_no_processor(make_stage: Callable[..., Stage]) -> None:
    measured = calibrate(make_stage(SlowEnv, **AUTO, **{"env.kwargs": {"step_s": 0.002}}))
    assert measured.whole.wall_s - measured.whole.cpu_s >= 4 * 0.0019
    assert measured.part.wall_s - measured.part.cpu_s >= 2 * 0.0019


def test_slow_environments_are_not_all_stepped(make_stage: Callable[..., Stage]) -> None:
    made = []

    def make() -> SlowEnv:
        made.append(1)
        return SlowEnv(0.01)

    measured = calibrate(make_stage(make, **{**AUTO, "actor.envs": 64}))
    assert len(made) <= 4, "one to read the spaces, one that imports packages, and two that are measured"
    assert measured.whole.wall_s >= 64 * 0.0095
    assert measured.part.wall_s == pytest.approx(measured.whole.wall_s / 2)


# Choosing.


def prepared(stage: Stage, context: Context | None = None) -> Prepared:
    context = context or stage.context
    role = Preparation(context.train, context.session, "", 0, context.spaces)
    role.step(0.0)
    return Prepared.read(context.session / PREPARED)


@pytest.mark.parametrize("mode", ["local", "central"])
def test_what_was_asked_for_is_what_is_chosen(make_stage: Callable[..., Stage], mode: str) -> None:
    stage = make_stage(**{**AUTO, "acting.mode": mode})
    assert choice.choose_acting(stage.context, InlineEngine(), prepared(stage), Stages(print)).mode == mode


def test_one_process_acts_locally(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(**{**AUTO, "acting.mode": "auto"})
    found = choice.choose_acting(stage.context, InlineEngine(), prepared(stage), Stages(print))
    assert found.mode == "local" and "one process" in found.reason


def test_who_makes_first_priorities_acts_locally(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(name="apex-dqn", **{**AUTO, "acting.mode": "auto", "replay.capacity": 10_000})
    found = choice.choose_acting(stage.context, InlineEngine(), prepared(stage), Stages(print))
    assert found.mode == "local" and "initial priorities" in found.reason
    context = replace(stage.context, train=changed(stage.context.train, **{"acting.value": True}))
    with pytest.raises(ConfigError, match=r"acting\.value=true, but the networks of apex-dqn have action values"):
        choice.choose_acting(context, InlineEngine(), prepared(stage), Stages(print))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"acting.groups": 3}, "acting.groups=3 does not divide"),
        ({"acting.servers": 9}, "acting.servers=9 exceeds"),
        ({"acting.device": "gpu"}, "device=gpu is not a device"),
    ],
)
def test_what_central_acting_could_not_do_is_refused_whatever_would_be_chosen(
    make_stage: Callable[..., Stage], fields: dict[str, Any], message: str
) -> None:
    stage = make_stage(**{**AUTO, "acting.mode": "auto"})
    context = replace(stage.context, train=changed(stage.context.train, **fields))
    with pytest.raises(ConfigError, match=message):
        choice.choose_acting(context, InlineEngine(), prepared(stage, context), Stages(print))


class Misbehaving(toy.CounterEnv):
    """Fails in its third step: `how` is a signal, 0 for an exception, -1 for a step that never ends."""

    def __init__(self, how: int) -> None:
        super().__init__(length=50)
        self.how = how

    def step(self, action: Any) -> toy.Step:
        if self.t == 2 and self.how < 0:
            time.sleep(3600.0)
        if self.t == 2 and self.how:
            os.kill(os.getpid(), self.how)
        if self.t == 2:
            raise RuntimeError("the simulator burnt down")
        return super().step(action)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    engine = LocalEngine(str(tmp_path_factory.mktemp("engine") / "session"), ["echelon.roles.calibration"])
    yield engine
    engine.close(0.0)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (int(signal.SIGKILL), "the calibration was ended by SIGKILL"),
        (0, "the calibration failed: EnvError: environment 0 .* the simulator burnt down"),
        (-1, "the calibration did not finish within 1 s"),
    ],
)
def test_environments_that_fail_in_the_calibration_cost_only_the_choice(
    make_stage: Callable[..., Stage],
    engine: LocalEngine,
    monkeypatch: pytest.MonkeyPatch,
    how: int,
    reason: str,
) -> None:
    name = f"{Path(__file__)}:Misbehaving"
    stage = make_stage(name, **{**AUTO, "acting.mode": "auto", "env.kwargs": {"how": how}})
    monkeypatch.setattr(choice, "LIMIT_S", 1.0 if how < 0 else DEADLINE_S)
    found = choice.choose_acting(stage.context, engine, prepared(stage), Stages(print))
    assert found.mode == "local"
    assert re.search(reason, found.reason), found.reason
    assert "\n" not in found.reason


def test_a_calibration_in_a_process_of_its_own_chooses(
    make_stage: Callable[..., Stage], engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage("CartPole-v1", **{**AUTO, "acting.mode": "auto", "engine": "local"})
    monkeypatch.setattr(choice, "LIMIT_S", DEADLINE_S)
    found = choice.choose_acting(stage.context, engine, prepared(stage), Stages(print))
    assert "steps/s against" in found.reason  # either, depending on the load of the machine
    assert not engine.exits() and engine.pid(choice.CALIBRATION) is None
    monkeypatch.setattr(choice, "forecast", lambda *given: Forecast(1.0, 2.0))
    assert choice.choose_acting(stage.context, engine, prepared(stage), Stages(print)).mode == "central"
