"""The gateway when workers leave or the run ends, and the bounds of workers' actions."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import toy_envs as toy
from echelon.errors import Refused
from echelon.roles import gateway as door_module
from echelon.roles.intake import action_bounds
from echelon.transport.episode_wire import EPISODES, Heartbeat, Leave, Next, RunEnded, Stopped, UnknownWorker, pack
from entrance import piece


@pytest.mark.parametrize(("calls", "word"), [(["over", "stop"], RunEnded), (["stop"], Stopped)])
def test_all_workers_are_told_whether_the_run_is_over_or_stopped(make_entrance: Any, calls: Any, word: Any) -> None:
    entrance = make_entrance()
    entrance.arrive()
    entrance.gateway.journal.enter("gone for ever")
    entrance.gateway.journal._workers["last_seen"] -= 1e6  # both were silent for long; one is still connected
    for call in calls:
        entrance.stage.world.post("gateway-0", call)
    assert isinstance(entrance.said(), word) and entrance.gateway.finished


def test_what_is_counted_is_answered_before_the_end_whoever_took_it(
    make_entrance: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a gateway dies before it replies, its successor replies, even if it only has time to say goodbye."""
    entrance = make_entrance()
    entrance.arrive()
    with monkeypatch.context() as patch:
        patch.setattr(entrance.gateway.server, "send", lambda *frames, **options: True)
        request = entrance.begin(EPISODES, list(pack(piece(number=1))), 1)
        entrance.until(lambda: entrance.head == 5, "it is counted")
    entrance.stage.world.post("gateway-0", "stop")
    answer = entrance.finish(request)
    assert isinstance(answer, Next) and answer.weights is None
    assert isinstance(entrance.said(), Stopped)


def test_nobody_keeps_a_door_open_by_talking(make_entrance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "GOODBYE_S", 0.05)
    entrance = make_entrance()
    entrance.gateway.journal.enter("coming back")
    monkeypatch.setattr(entrance.gateway.server, "take", lambda most: most)
    entrance.gateway.station.stop_requested = True
    entrance.gateway.step(0.0)
    assert entrance.gateway.finished


def test_workers_that_leave_are_forgotten_and_those_that_show_a_sign_are_not(make_entrance: Any) -> None:
    entrance = make_entrance()
    entrance.arrive()
    journal, worker_registry = entrance.gateway.journal, entrance.gateway.worker_registry
    journal._workers["last_seen"] -= 1e6
    assert worker_registry.num_active == 0
    entrance.say(Heartbeat("w"))
    entrance.until(lambda: worker_registry.num_active == 1, "the sign was seen")
    for message in (Heartbeat("nobody"), Leave("nobody"), Leave("w")):
        entrance.say(message)
    entrance.until(lambda: journal.sockets(float("inf")) == [], "it is forgotten")
    assert isinstance(entrance.ask(piece()), UnknownWorker)
    entrance.stage.world.poll(0.0)
    assert (
        "worker w joined (1 active)" in entrance.stage.messages
        and "worker w left (0 active)" in entrance.stage.messages
    )


def test_continuous_actions_keep_to_their_bounds(make_entrance: Any) -> None:
    entrance = make_entrance(toy.ForceEnv, name="sac", **{"env.kwargs": {"dtype": "float32"}})
    entrance.arrive()
    for number, value in enumerate((-1.0, np.nextafter(np.float32(1.0), np.float32(2.0))), 1):
        assert isinstance(entrance.ask(piece(number=number, action=np.full((5, 1), value, np.float32))), Next)
    answer = entrance.ask(piece(number=3, action=np.full((5, 1), 1.5, np.float32)))
    assert isinstance(answer, Refused) and "action holds 1.5" in str(answer)
    low, high = action_bounds(gym.spaces.Box(np.float32([-2, 0]), np.float32([2, 1])), as_env=True)
    assert low.tolist() == [-2.0, 0.0] and high.tolist() == [2.0, 1.0]
