"""Central acting over TCP: which clients a server admits, which requests it accepts, and when it starts to listen."""

from __future__ import annotations

import dataclasses
import stat
from collections.abc import Callable
from typing import Any

import pytest

from echelon.errors import Refused
from echelon.roles import inference as inference_role
from echelon.roles.inference import Inference
from echelon.roles.plan.layouts import act_layout
from echelon.roles.plan.parts import Plan
from echelon.transport.remote_seat import RemoteSeat
from echelon.transport.session import secret_of
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


def take_seat(stage: Stage, secret: str | None, incarnation: int = 0) -> RemoteSeat:
    address = stage.plan.act_address_file(0).read_text()
    return RemoteSeat(address, act_layout(stage.context), 0, 0, incarnation, secret)


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
    def test_a_run_without_one_makes_its_own_that_only_its_user_reads(
        self, make_tcp_stage: Callable[..., Stage]
    ) -> None:
        session = make_tcp_stage().context.session
        assert stat.S_IMODE((session / "secret").stat().st_mode) == 0o600
        assert len(set(secret_of(session))) > 4 and len(secret_of(session)) == 64

    def test_every_run_has_another(self, make_tcp_stage: Callable[..., Stage]) -> None:
        stage = make_tcp_stage()
        (session := stage.context.session / "another").mkdir()
        other = Plan(dataclasses.replace(stage.context, session=session))
        other.make()
        assert secret_of(session) != secret_of(stage.context.session)

    def test_that_of_the_environment_wins(
        self, make_tcp_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stage = make_tcp_stage()
        monkeypatch.setenv("ECHELON_SECRET", SECRET)
        assert secret_of(stage.context.session) == SECRET
        (session := stage.context.session / "another").mkdir()
        other = Plan(dataclasses.replace(stage.context, session=session))
        other.make()
        assert not (session / "secret").exists()

    def test_shared_memory_needs_none(self, make_tcp_stage: Callable[..., Stage]) -> None:
        assert not (make_tcp_stage(**{"acting.transport": "shm"}).context.session / "secret").exists()

    @pytest.mark.parametrize("given", [None, SECRET])
    def test_actors_are_let_in_and_nobody_else(
        self, make_tcp_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, given: str | None
    ) -> None:
        stage = make_tcp_stage()
        if given is not None:
            monkeypatch.setenv("ECHELON_SECRET", given)
        inference, actor = stage.inference(), stage.actor()
        stranger = take_seat(stage, secret=None, incarnation=7)
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
        inference, secret = stage.inference(), secret_of(stage.context.session)
        stray = take_seat(stage, secret)
        stray.observation[0][...] = 10**6
        stray.ask()
        with pytest.raises(Refused, match="observation holds 1000000"):
            until(inference, lambda: stray.answered, "it was refused")
        assert refused(inference) == 1
        good = take_seat(stage, secret, incarnation=1)
        good.observation[0][...] = 15
        good.ask()
        until(inference, lambda: good.answered, "a good one was answered")
        for seat in (stray, good):
            seat.leave()
