"""Pending workers: a learner without an environment gets its spaces from the first suitable worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

import toy_envs as toy
from echelon.config import TrainConfig, UserPolicyConfig, replace
from echelon.errors import Refused
from echelon.roles.pending_workers import await_spaces
from echelon.roles.user_policy import StateLayout
from echelon.schema import Spaces
from echelon.transport.channel import HEADER
from echelon.transport.channel_client import Client, PendingRequest
from echelon.transport.episode_wire import EPISODES, TASK, Register, Score, TaskRequest, pack
from echelon.version import __version__
from stage import Stage

FIELDS = {"engine": "local", "workers.address": "tcp://127.0.0.1:0"}
DEADLINE_S = 30.0
SCORE = Score("w", 1, 1, 1, 1.0, 5)


class Crowd:
    """Workers that arrive one after the other once the learner listens, each on its own connection."""

    def __init__(self, *messages: Any) -> None:
        self.messages, self.told, self.clients = messages, list[str](), list[tuple[Client, PendingRequest]]()

    def tell(self, text: str) -> None:
        self.told.append(text)
        if text.startswith("waiting at "):
            for message in self.messages:
                client = Client("the learner", "tcp://" + text.split()[2], 1 << 20)
                frames = [bytearray(HEADER.size), *(message if isinstance(message, list) else pack(message))]
                service = EPISODES if isinstance(message, Score) else TASK
                request = client.ask(service, lambda frames=frames: frames, number=getattr(message, "number", 0))
                self.clients.append((client, request))

    def reasons(self) -> list[str]:
        """Returns the reasons of the refusals and closes all connections."""
        found = []
        for client, request in self.clients:
            try:
                assert client.wait(request, DEADLINE_S)
            except Refused as error:
                found.append(str(error))
        self.close()
        return found

    def close(self) -> None:
        for client, _ in self.clients:
            client.close()


def arrive(spaces: Spaces, *, own: bool = False) -> Register:
    return Register(__version__, "w", spaces.to_json(), own)


def wait(config: TrainConfig, own: StateLayout | None, crowd: Crowd, misfits: Crowd) -> tuple[Spaces, str]:
    """Lets the unsuitable workers arrive first, and the others once all of those are refused."""

    def tell(text: str) -> None:
        misfits.tell(text)
        crowd.told.append(text)
        if len([told for told in misfits.told if "was refused" in told]) == len(misfits.messages):
            crowd.tell(misfits.told[0])

    return await_spaces(config, own, tell)


def test_the_first_worker_says_what_is_observed_and_done(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(toy.CounterEnv, "dqn", **FIELDS)
    config = replace(stage.context.train, algorithm=UserPolicyConfig())
    layout = StateLayout.of({"w": np.zeros(3, np.float32)})
    crowd = Crowd([b"x"], SCORE, TaskRequest(__version__), arrive(stage.context.spaces, own=True))
    spaces, address = await_spaces(config, layout, crowd.tell)
    assert spaces.observation == stage.context.spaces.observation and address.rpartition(":")[2] != "0"
    crowd.close()


def test_workers_that_do_not_fit_are_refused_and_the_next_is_waited_for(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(toy.CounterEnv, "dqn", **FIELDS)
    good = stage.context.spaces
    square, force = (gym.spaces.Box(-1.0, 1.0, shape, np.float32) for shape in ((2, 2), (2,)))
    misfits = Crowd(
        arrive(Spaces(good.observation, square)),  # no built-in policy has such actions
        arrive(Spaces(good.observation, force)),  # nor does this algorithm
        arrive(good, own=True),
        TaskRequest("0.0.7"),
    )
    crowd = Crowd(arrive(good))
    spaces, _ = wait(stage.context.train, None, crowd, misfits)
    assert spaces.action == good.action
    crowd.close()
    reasons = sorted(misfits.reasons())
    assert len(reasons) == 4 and sum("does not fit" in reason for reason in reasons) == 2
    assert any("has a policy of its own" in reason for reason in reasons)
    assert any("has Echelon 0.0.7" in reason for reason in reasons)


def test_a_worker_whose_observations_need_too_much_memory_is_refused(make_stage: Callable[..., Stage]) -> None:
    """Before anything is allocated: the run must not end because the first worker is an unsuitable one."""
    wide = {"replay.capacity": 1 << 20, "network.hidden": (1 << 16,)}
    stage = make_stage(toy.CounterEnv, "dqn", **FIELDS)
    good = stage.context.spaces
    image, word = gym.spaces.Box(0, 1, (1 << 20,), np.float32), gym.spaces.Discrete(1 << 20)
    misfits = Crowd(*(arrive(Spaces(space, good.action)) for space in (image, word)))
    crowd = Crowd(arrive(good))
    wait(replace(stage.context.train, **wide), None, crowd, misfits)
    crowd.close()
    reasons = " ".join(misfits.reasons())
    assert "the network needs" in reasons and "replay.capacity=1048576 needs" in reasons
