"""When a role counts as hung: judged by its progress, on a clock that the test turns."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echelon.config import TrainConfig
from echelon.engines.process import Exit, Failure, ProcessSpec
from echelon.roles import supervisor as module
from echelon.roles.context import Context
from echelon.roles.supervisor import PROCESSES, START_GRACE_S, Supervisor, origin_of
from echelon.schema import Spaces
from echelon.world.directory import Progress
from toy_envs import CounterEnv

HANG_S = TrainConfig().supervision.hang_timeout_s


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Engine:
    """Starts nothing; its one role is process 7."""

    server_pid = 2

    def __init__(self) -> None:
        self.process: int | None = 7
        self.signals: list[int] = []
        self.started: list[ProcessSpec] = []

    def start(self, spec: ProcessSpec) -> None:
        self.started.append(spec)

    def is_here(self, name: str) -> bool:
        return False

    def pid(self, name: str) -> int | None:
        return self.process

    def signal(self, name: str, number: int) -> None:
        self.signals.append(number)


class Node:
    """Knows the progress that the test wrote down, or none: the role has not joined, or has left."""

    def __init__(self) -> None:
        self.progress: Progress | None = None

    def last_progress(self, name: str) -> Progress | None:
        return self.progress

    def forget(self, name: str, reason: str) -> None:
        self.progress = None


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A supervisor with one actor that was just started."""
    clock, engine, world, told = Clock(), Engine(), Node(), list[str]()
    monkeypatch.setattr(module, "time", clock)
    env = CounterEnv()
    spaces = Spaces(env.observation_space, env.action_space)
    context = Context("host", 0, 0, 0, TrainConfig(), spaces, (), tmp_path, "ipc://x", tmp_path, 0.0)
    supervisor = Supervisor(context, engine, world, told.append)  # type: ignore[arg-type]
    supervisor.start("actor-0", "actor", 0)
    return SimpleNamespace(clock=clock, engine=engine, world=world, told=told, supervisor=supervisor, folder=tmp_path)


def test_a_role_has_time_to_begin(scene: Any) -> None:
    scene.world.progress = Progress(0, 1000.0, 7, 1000.0)  # joined, and still at its imports
    scene.clock.now += START_GRACE_S
    scene.supervisor.look()
    assert not scene.engine.signals
    scene.clock.now += 1.0
    scene.supervisor.look()
    assert scene.engine.signals == [signal.SIGUSR1, signal.SIGKILL]


def test_one_that_stands_still_is_killed_once(scene: Any) -> None:
    scene.world.progress = Progress(5, 1000.0, 7, 1000.0)
    scene.clock.now += HANG_S
    scene.supervisor.look()
    assert not scene.engine.signals
    scene.clock.now += 1.0
    for _ in range(3):  # its exit takes a while
        scene.supervisor.look()
    assert scene.engine.signals == [signal.SIGUSR1, signal.SIGKILL]
    assert "actor-0 made no progress for 31.0 s; killing it" in scene.told[0]


def test_one_that_left_is_given_the_same_time_to_close(scene: Any) -> None:
    """However long it worked before: its silence begins with its last progress."""
    scene.clock.now += 500.0
    scene.world.progress = Progress(5, scene.clock.now, 7, 1000.0)
    scene.supervisor.look()
    scene.world.progress = None
    scene.clock.now += HANG_S
    scene.supervisor.look()
    assert not scene.engine.signals
    scene.clock.now += 1.0
    scene.supervisor.look()
    assert scene.engine.signals == [signal.SIGUSR1, signal.SIGKILL]


def test_a_successor_is_not_judged_by_its_predecessor(scene: Any) -> None:
    scene.world.progress = Progress(5, 1000.0, 7, 1000.0)
    scene.clock.now += HANG_S + 1.0
    scene.supervisor.look()
    scene.supervisor.replace(Exit("actor-0", 7, -1, signal.SIGKILL))
    scene.engine.signals.clear()
    scene.engine.process = 8
    scene.world.progress = Progress(5, 1000.0, 7, 1000.0)  # a beat of the dead one that came late
    scene.clock.now += HANG_S + 1.0
    scene.supervisor.look()
    assert not scene.engine.signals
    assert [spec.config["incarnation"] for spec in scene.engine.started] == [0, 1]
    assert scene.supervisor.restarts == 1


def test_processes_are_written_down(scene: Any) -> None:
    scene.supervisor.look()
    record = json.loads((scene.folder / PROCESSES).read_text())
    assert record["actor-0"] == {"pid": 7, "incarnation": 0}
    assert record["forkserver"] == {"pid": 2}
    scene.engine.process = None
    scene.supervisor.look()
    assert "actor-0" not in json.loads((scene.folder / PROCESSES).read_text())


def test_a_failure_is_the_same_when_it_comes_from_the_same_line() -> None:
    def failure(message: str, line: int) -> Failure:
        trace = f'Traceback:\n  File "role.py", line 3, in step\n  File "net.py", line {line}, in forward\n{message}'
        return Failure("ValueError", message, trace, expected=False)

    assert origin_of(failure("0.123", 7)) == origin_of(failure("0.456", 7))
    assert origin_of(failure("0.123", 7)) != origin_of(failure("0.123", 8))
