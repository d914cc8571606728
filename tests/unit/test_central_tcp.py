"""Central acting over TCP: which clients a server admits, which requests it accepts, and when it starts to listen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from echelon.errors import Refused
from echelon.roles import inference as inference_role
from echelon.roles.inference import Inference
from echelon.roles.plan.layouts import act_layout
from echelon.transport.remote_seat import RemoteSeat
from running import wait_until
from stage import Stage

SECRET = "a secret of the tests"
TCP = {
    "acting.mode": "central",
    "acting.transport": "tcp",
    "acting.device": "cpu",
    "engine": "local",
    "actor.num_actors": 1,
}


@pytest.fixture
def make_tcp_stage(make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stage]:
    """A stage without a secret in the environment variables."""
    monkeypatch.delenv("ECHELON_SECRET", raising=False)
    return lambda *place, **fields: make_stage(*place, **{**TCP, **fields})


def take_seat(stage: Stage, incarnation: int = 0) -> RemoteSeat:
    address = stage.plan.act_address_file(0).read_text()
    return RemoteSeat(address, act_layout(stage.context), 0, 0, incarnation)


def until(inference: Inference, condition: Callable[[], bool], what: str) -> None:
    """Serves until `condition` holds."""

    def look() -> bool:
        inference.step(0.0)
        return condition()

    wait_until(look, what)


def refused(inference: Inference) -> int:
    listener = inference.server.listener
    assert listener is not None
    return listener.num_refused


class TestSecret:
    @pytest.mark.parametrize("given", [None, SECRET])
    def test_actors_are_let_in_and_nobody_else(
        self, make_tcp_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, given: str | None
    ) -> None:
        stage = make_tcp_stage()
        if given is not None:
            monkeypatch.setenv("ECHELON_SECRET", given)
        inference, actor = stage.inference(), stage.actor()
        with monkeypatch.context() as others:
            others.setenv("ECHELON_SECRET", SECRET + "!")
            stranger = take_seat(stage, incarnation=7)
        stranger.ask()
        until(inference, lambda: refused(inference) > 0, "the stranger was refused")
        stage.ring.grant(0, 1)

        def has_acted() -> bool:
            actor.step(0.0)
            return stage.ring.num_ready(0) == 1

        until(inference, has_acted, "the actor acts")
        try:
            assert not stranger.answered
        except Refused as error:  # it may have noticed the refusal by now
            assert "refuses the handshake" in str(error)
        stranger.leave()


class TestDoor:
    def test_it_opens_when_there_is_somebody_to_answer(
        self, make_tcp_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stage, opened = make_tcp_stage(), []
        make_answerer = inference_role.PolicyAnswerer

        def look(*arguments: Any, **options: Any) -> Any:
            opened.append(stage.plan.act_address_file(0).exists())
            return make_answerer(*arguments, **options)

        monkeypatch.setattr(inference_role, "PolicyAnswerer", look)
        stage.inference()
        assert opened == [False] and stage.plan.act_address_file(0).exists()

    def test_an_observation_that_its_space_does_not_have_ends_nothing(
        self, make_tcp_stage: Callable[..., Stage]
    ) -> None:
        stage = make_tcp_stage("FrozenLake-v1")
        inference = stage.inference()
        stray = take_seat(stage)
        stray.observation[0][...] = 10**6
        stray.ask()
        with pytest.raises(Refused, match="observation holds 1000000"):
            until(inference, lambda: stray.answered, "it was refused")
        assert refused(inference) == 1
        good = take_seat(stage, incarnation=1)
        good.observation[0][...] = 15
        good.ask()
        until(inference, lambda: good.answered, "a good one was answered")
        for seat in (stray, good):
            seat.leave()
