"""What a worker does, and refuses to do, at the request of a real or malicious learner."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from echelon import config_io
from echelon.asynchronous import connection as connection_module
from echelon.asynchronous import worker as worker_module
from echelon.asynchronous.acting import ModelActing
from echelon.asynchronous.connection import LearnerConnection
from echelon.asynchronous.worker import AsyncWorker
from echelon.config import EnvConfig, replace
from echelon.errors import ConfigError, TransportTimeout
from echelon.presets import preset
from echelon.schema import Spaces
from echelon.transport.channel import Message
from echelon.transport.channel_server import Server
from echelon.transport.episode_wire import (
    EPISODES,
    TASK,
    EpisodePiece,
    FromGateway,
    FromWorker,
    Heartbeat,
    Leave,
    Register,
    RunEnded,
    Stopped,
    Task,
    TaskRequest,
    Wait,
    Welcome,
    from_worker,
    pack,
)
from echelon.trust import LEARNER, check_names
from echelon.version import __version__
from running import wait_until

Answers = Callable[[FromWorker], list[FromGateway]]


@contextlib.contextmanager
def learner(answers: Answers) -> Iterator[tuple[str, list[FromWorker]]]:
    """Runs a fake learner; yields its address and the messages that it received."""
    server, heard, ended = Server("workers", "tcp://127.0.0.1:0", 1 << 20), list[FromWorker](), threading.Event()

    def take(asked: Message) -> None:
        heard.append(from_worker(asked))
        for answer in answers(heard[-1]):
            if isinstance(answer, RunEnded | Stopped):
                server.post(asked.connection, EPISODES, *pack(answer))
            else:
                server.answer(asked, *pack(answer))

    def serve() -> None:
        while not ended.is_set():
            while server.take(1):
                pass
            server.sleep(0.01)
        server.close()

    server.serve(TASK, take)
    server.serve(EPISODES, take)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server.address, heard
    finally:
        ended.set()
        thread.join()


def task(**changes: Any) -> Task:
    return Task(config_io.to_json(replace(preset("dqn", "CartPole-v1"), **changes)), None)


def work(asked: Task, **options: Any) -> tuple[str, list[FromWorker]]:
    """Runs a worker whose learner ends when the worker registers; returns the worker's output and messages."""
    output = io.StringIO()

    def answers(message: FromWorker) -> list[FromGateway]:
        return [] if isinstance(message, Leave) else [asked if isinstance(message, TaskRequest) else RunEnded()]

    with learner(answers) as (address, heard):
        AsyncWorker(address, output=output, **options).work()
    return output.getvalue(), heard


def test_a_learner_runs_no_code_of_its_choice_on_a_worker(tmp_path: Path) -> None:
    made = tmp_path / "made"
    asked = task(**{"env.id": "os:system", "env.kwargs": {"command": f"touch {made}"}})
    with pytest.raises(ConfigError, match=r"asks for env.id='os:system', code that .*--env .*--trust-learner"):
        work(asked)
    assert not made.exists()
    told, heard = work(asked, env="CartPole-v1")  # named on the worker
    assert any(isinstance(message, Register) for message in heard) and "the run is over; 0 episodes" in told


@pytest.mark.parametrize(
    "changes",
    [
        {"env.id": "toy_envs:CounterEnv"},
        {"env.id": "toy_envs:Counter-v0"},  # gymnasium would import the module
        {"env.id": "/tmp/file.py:make"},
        {"env.id": "echelon.names:importlib.import_module", "env.kwargs": {"name": "antigravity"}},
        {"env.id": "echelon.envs.make:inspect"},
        {"env.id": "echelon.envs.racing:make_car_racing"},
        {"env.id": "echelon.envs.racing:gym.Env"},
        {"env.id": "echelon.envs.racing:VectorEnv"},
        {"env.id": "echelon.envs.nes:Emulator"},
        {"env.id": "GymV21Environment-v0", "env.kwargs": {"env_id": "os:Any-v0"}},
        {"env.id": "envpool:os:system"},
        {"env.wrappers": ("toy_envs:Doubled",)},
        {"network.name": "toy_envs:network"},
    ],
)
def test_names_of_others_are_refused(changes: dict[str, Any]) -> None:
    config = replace(preset("dqn", "CartPole-v1"), **changes)
    field = next(iter(changes))
    with pytest.raises(ConfigError, match=rf"asks for {field}=.*trust_learner=True"):
        check_names(config, LEARNER)
    if field.startswith("env."):
        check_names(config, LEARNER, env=False)


@pytest.mark.parametrize(
    "id",
    [
        *("CartPole-v1", "ALE/Pong-v5", "Space/Some.Env-v0", "envpool:Pong-v5", "SuperMarioBros-1-1"),
        *("echelon.envs.racing:PixelPool", "echelon.envs.mario:MarioPool"),
    ],
)
def test_names_of_known_environments_are_taken(id: str) -> None:
    check_names(preset("dqn", id), LEARNER)


def test_a_trusted_learner_may_name_what_it_likes() -> None:
    with pytest.raises(ConfigError, match="toy_envs:CounterEnv"):
        work(task(**{"env.id": "toy_envs:CounterEnv"}))
    _, heard = work(task(**{"env.id": "toy_envs:CounterEnv"}), trust_learner=True)
    assert any(isinstance(message, Register) for message in heard)
    _, heard = work(task(**{"env.wrappers": ("toy_envs:lost",)}), env=EnvConfig("CartPole-v1"))
    assert any(isinstance(message, Register) for message in heard)


def test_a_stopped_learner_is_waited_for_and_told_of_once() -> None:
    told: list[str] = []
    asked = task()
    with learner(lambda message: [Stopped(), Stopped(), asked]) as (address, _):
        connection = LearnerConnection(address, "w", 60.0, told.append)
        assert isinstance(connection.ask(TaskRequest(__version__), Task), Task)
        connection.close()
    assert [text.partition(address)[2] for text in told] == [
        " was stopped; retrying until it is resumed",
        " is back",
    ]


def test_a_worker_says_goodbye_whatever_ends_it() -> None:
    with learner(lambda message: [task()] if isinstance(message, TaskRequest) else []) as (address, heard):
        output = io.StringIO()
        worker = AsyncWorker(address, env="No-v0", output=output)
        with pytest.raises(ConfigError, match="is not registered with gymnasium"):
            worker.work()
        wait_until(lambda: any(isinstance(message, Leave) for message in heard), "the worker sent Leave")
    assert "leaving; 0 episodes sent" in output.getvalue()


@pytest.mark.parametrize("is_starting", [False, True])
def test_a_learner_that_is_still_starting_is_given_time(monkeypatch: pytest.MonkeyPatch, is_starting: bool) -> None:
    """After it replied Wait, nothing listens for some seconds until its gateway opens; that is not reported."""
    monkeypatch.setattr(connection_module, "REPORT_AFTER_S", 0.0)
    told: list[str] = []
    words: list[FromGateway] = [Wait()] if is_starting else []
    with learner(lambda message: [words.pop()] if words else []) as (address, _):
        connection = LearnerConnection(address, "w", 0.1, told.append)
        with pytest.raises(TransportTimeout):
            connection.ask(TaskRequest(__version__), Task)
        connection.close()
    assert bool(told) != is_starting


def test_a_worker_shows_signs_of_life_during_a_long_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "HEARTBEAT_S", 0.0)
    spaces = Spaces(gym.spaces.Box(-np.inf, np.inf, (4,), np.float32), gym.spaces.Discrete(2))
    weights = ModelActing(preset("dqn", "CartPole-v1"), spaces, 0, 1, 0).mirror.memory
    answers: dict[type, FromGateway] = {
        TaskRequest: task(),
        Register: Welcome(0, 1, weights, 0),
        EpisodePiece: RunEnded(),
    }
    output = io.StringIO()
    with learner(lambda message: [answers[type(message)]] if type(message) in answers else []) as (address, heard):
        assert AsyncWorker(address, output=output).work() == 0
    assert any(isinstance(message, Heartbeat) for message in heard)
    assert f"at {address.removeprefix('tcp://')}, CartPole-v1, dqn" in output.getvalue()
