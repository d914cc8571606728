"""The lobby: a learner without an environment takes its spaces from the first worker that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

import toy_envs as toy
from echelon.config import OwnConfig, TrainConfig, replace
from echelon.roles.lobby import await_spaces
from echelon.roles.own import StateLayout
from echelon.schema import Spaces
from echelon.transport.episode_wire import PROTOCOL, Arrive, Ask, Refusal, Score, from_door, pack
from echelon.transport.sockets import connect
from stage import Stage

FIELDS = {"engine": "local", "workers.address": "tcp://127.0.0.1:0"}
DEADLINE_MS = 30_000
SCORE = Score("w", 1, 1, 1, 1.0, 5)


class Crowd:
    """Workers that come one after the other as soon as a lobby is open, each on a connection of its own."""

    def __init__(self, *messages: list[Any]) -> None:
        self.messages, self.told, self.sockets = messages, list[str](), list[Any]()

    def tell(self, text: str) -> None:
        self.told.append(text)
        if text.startswith("waiting at "):
            for frames in self.messages:
                self.sockets.append(connect("tcp://" + text.split()[2], None, 1 << 20))
                self.sockets[-1].send_multipart(frames)

    def reasons(self) -> list[str]:
        """Why those that came first were refused; closes all."""
        found = []
        for socket in self.sockets[:-1]:
            assert socket.poll(DEADLINE_MS)
            answer = from_door([frame.buffer for frame in socket.recv_multipart(copy=False)])
            found += [answer.reason] if isinstance(answer, Refusal) else []
        for socket in self.sockets:
            socket.close(linger=0)
        return found


def arrive(spaces: Spaces, *, own: bool = False) -> list[Any]:
    return list(pack(Arrive(PROTOCOL, "w", spaces.to_json(), own)))


def wait(config: TrainConfig, own: StateLayout | None, crowd: Crowd, misfits: Crowd) -> tuple[Spaces, str]:
    """Has the misfits come first, and the others once all of them are refused."""

    def tell(text: str) -> None:
        misfits.tell(text)
        crowd.told.append(text)
        if len([told for told in misfits.told if "was refused" in told]) == len(misfits.messages):
            crowd.tell(misfits.told[0])

    return await_spaces(config, own, tell)


def test_the_first_worker_says_what_is_observed_and_done(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(toy.CounterEnv, "dqn", **FIELDS)
    config = replace(stage.context.train, algorithm=OwnConfig())
    layout = StateLayout.of({"w": np.zeros(3, np.float32)})
    crowd = Crowd([b"x"], list(pack(SCORE)), list(pack(Ask(PROTOCOL))), arrive(stage.context.spaces, own=True))
    spaces, address = await_spaces(config, layout, crowd.tell)
    assert spaces.observation == stage.context.spaces.observation and address.rpartition(":")[2] != "0"
    for socket in crowd.sockets:
        socket.close(linger=0)


def test_workers_that_do_not_fit_are_refused_and_the_next_is_waited_for(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(toy.CounterEnv, "dqn", **FIELDS)
    good = stage.context.spaces
    square, force = (gym.spaces.Box(-1.0, 1.0, shape, np.float32) for shape in ((2, 2), (2,)))
    misfits = Crowd(
        arrive(Spaces(good.observation, square)),  # no policy acts so
        arrive(Spaces(good.observation, force)),  # nor this rule
        arrive(good, own=True),
        list(pack(Ask(PROTOCOL + 1))),
    )
    crowd = Crowd(arrive(good))
    spaces, _ = wait(stage.context.train, None, crowd, misfits)
    assert spaces.action == good.action
    misfits.sockets.append(crowd.sockets[0])
    reasons = sorted(misfits.reasons())
    assert len(reasons) == 4 and sum("does not fit" in reason for reason in reasons) == 2
    assert any("brings a policy of its own" in reason for reason in reasons)
    assert any("speaks protocol" in reason for reason in reasons)
