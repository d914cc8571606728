"""A gateway and a worker's socket in one thread, for tests."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import toy_envs as toy
from echelon.errors import Refused
from echelon.roles.gateway import Gateway
from echelon.schema import Spaces
from echelon.transport.channel import HEADER, Service
from echelon.transport.channel_client import Client, PendingRequest
from echelon.transport.episode_wire import (
    EPISODES,
    TASK,
    EpisodePiece,
    Heartbeat,
    Leave,
    Register,
    TaskRequest,
    from_gateway,
    pack,
    socket_name,
)
from echelon.version import __version__
from running import wait_until
from stage import Stage

Array = np.ndarray[Any, Any]
MakeStage = Callable[..., Stage]
DEADLINE_S = 30.0
GAMMA = 0.5
FIELDS = {"engine": "local", "workers.address": "tcp://127.0.0.1:0", "workers.max_steps": 64, "replay.n_step": 3}
FIELDS |= {"replay.capacity": 256, "replay.min_size": 8, "replay.batch": 8, "algorithm.discount": GAMMA}


class Entrance:
    """A gateway and a worker's client in one thread."""

    def __init__(self, stage: Stage, *, is_open: bool = True) -> None:
        self.stage, self.told = stage, dict[str, list[Any]]()
        stage.world.serve("workers", self.told.setdefault("workers", []).append)
        scores = self.told.setdefault("worker_evaluation", [])
        stage.world.serve("worker_evaluation", lambda number, score: scores.append((number, score)))
        if is_open:
            self.open()
        self.gateway = self.make_gateway()
        self.client = self.connect()

    def connect(self, name: bytes = socket_name("w")) -> Client:
        return Client("the learner", self.gateway.server.address, 1 << 24, name=name)

    def open(self) -> None:
        self.stage.plan.replay.tally().open(0, 0)

    def make_gateway(self, incarnation: int = 0) -> Gateway:
        context = dataclasses.replace(self.stage.context, name=f"gateway-{incarnation}", incarnation=incarnation)
        return Gateway(context)

    def begin(self, service: Service, frames: list[Any], number: int = 0) -> PendingRequest:
        """Sends a message."""
        whole = [bytearray(HEADER.size), *frames]
        return self.client.ask(service, lambda: whole, number=number)

    def finish(self, request: PendingRequest, timeout_s: float = DEADLINE_S) -> Any:
        """Returns the reply or the error of a refusal, or None if none arrives in time."""
        deadline = time.monotonic() + timeout_s
        try:
            while time.monotonic() < deadline:
                self.gateway.step(0.01)
                if self.client.wait(request, 0.0):
                    assert request.answer is not None
                    return from_gateway(request.answer[1:])
        except Refused as error:
            return error
        self.client.forget(request)
        return None

    def said(self) -> Any:
        """Returns the message with which the gateway announced its end."""

        def look() -> bool:
            self.gateway.step(0.01)
            self.client.poll()
            return bool(self.client.posts)

        wait_until(look, "it said so")
        return from_gateway(self.client.posts.popleft()[1:])

    def say(self, message: Heartbeat | Leave) -> None:
        self.client.post(EPISODES, [bytearray(HEADER.size), *pack(message)])

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Steps the gateway until `condition` holds; for messages without a reply."""
        wait_until(lambda: (self.gateway.step(0.01), condition())[1], what)

    def ask(self, message: Any, timeout_s: float = DEADLINE_S) -> Any:
        service = TASK if isinstance(message, TaskRequest | Register) else EPISODES
        return self.finish(self.begin(service, list(pack(message)), getattr(message, "number", 0)), timeout_s)

    def arrive(self, name: str = "w", spaces: Spaces | None = None) -> Any:
        return self.ask(Register(__version__, name, (spaces or self.stage.context.spaces).to_json(), False))

    def items(self) -> dict[str, Array]:
        return items_of(self.stage)

    @property
    def head(self) -> int:
        return self.gateway.intake.writer.head

    def close(self) -> None:
        self.client.close()
        self.gateway.close()


@pytest.fixture
def make_entrance(make_stage: MakeStage) -> Iterator[Callable[..., Entrance]]:
    made: list[Entrance] = []

    def make(env: Any = toy.CounterEnv, *, is_open: bool = True, **fields: Any) -> Entrance:
        name = fields.pop("name", "dqn")
        made.append(Entrance(make_stage(env, name, **{**FIELDS, **fields}), is_open=is_open))
        return made[-1]

    yield make
    for entrance in made:
        entrance.close()


def piece(length: int = 5, number: int = 1, **changes: Any) -> EpisodePiece:
    """An episode of the counter that terminates."""
    t = np.arange(length + 1)
    fields: dict[str, Any] = {
        "worker": "w",
        "number": number,
        "has_version": 1,
        "observation": [np.stack([np.full(length + 1, number), t, t * 0 + 7], 1).astype(np.float32)],
        "action": np.zeros(length, np.int64),
        "reward": (100 * number + t[1:]).astype(np.float32),
        "version": np.ones(length, np.int64),
        "num_old": 0,
        "terminated": True,
        "truncated": False,
        "episode_return": 10.0,
        "episode_length": length,
    }
    return EpisodePiece(**{**fields, **changes})


def items_of(stage: Stage) -> dict[str, Array]:
    reader = stage.plan.replay.readers()[0]
    start, head = reader.window()
    block = reader.layout.block(head - start)
    assert reader.read(np.arange(start, head), block).all()
    return {**block.fields, "priority": reader.initial(start, head)}
