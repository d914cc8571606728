"""The supervisor: when a role counts as hung, restarts and failures, on a clock that the test advances."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echelon.config import TrainConfig, replace
from echelon.engines.process import Exit, Failure, ProcessSpec
from echelon.errors import EnvError, RunError
from echelon.roles import supervisor as module
from echelon.roles.context import Context
from echelon.roles.gauge import PHASES, Gauge
from echelon.roles.supervisor import PROCESSES, Supervisor, origin_of
from echelon.runs.bottleneck import bottleneck
from echelon.schema import Spaces
from toy_envs import CounterEnv

HANG_S = TrainConfig().supervision.hang_timeout_s


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def watch(scene: Any, seconds: float) -> None:
    """Advances the clock by `seconds`, with a call of `look` every second."""
    end = scene.clock.now + seconds
    while scene.clock.now < end:
        scene.clock.now = min(end, scene.clock.now + 1.0)
        scene.supervisor.look()


class Engine:
    """An engine that starts nothing; its one role is process 7. Roles that print a stack write it to their logs."""

    server_pid = 2

    def __init__(self) -> None:
        self.process: int | None = 7
        self.host, self.is_heard = "", True
        self.signals: list[int] = []
        self.started: list[ProcessSpec] = []
        self.killed: list[str] = []
        self.stacks: dict[Path, str] = {}

    def start(self, spec: ProcessSpec) -> None:
        self.started.append(spec)

    def is_here(self, name: str) -> bool:
        return False

    def pid(self, name: str) -> int | None:
        return self.process

    def place(self, name: str) -> str:
        return self.host

    def has_current_gauge(self, name: str) -> bool:
        return self.is_heard

    def signal(self, name: str, number: int) -> None:
        self.signals.append(number)
        if number == signal.SIGKILL:
            self.killed.append(name)
        for log, stack in self.stacks.items():
            if number == signal.SIGUSR1 and log.stem == name:
                log.write_text(stack)


class Node:
    """A world without members."""

    def forget(self, name: str, reason: str) -> None:
        pass


def show(scene: Any, progress: int, incarnation: int = 0) -> None:
    """Sets the progress in the gauge of every role, as if it had just been started in this incarnation."""
    for name in scene.supervisor.members:
        gauge = Gauge(scene.folder, name)
        gauge.begin(incarnation)
        gauge.show(progress, dict.fromkeys(PHASES, 0.0))
    scene.supervisor.look()


def make_scene(folder: Path, monkeypatch: pytest.MonkeyPatch, config: TrainConfig, *names: str) -> Any:
    """A supervisor with roles that have just been started."""
    clock, engine, world, told = Clock(), Engine(), Node(), list[str]()
    monkeypatch.setattr(module, "time", clock)
    env = CounterEnv()
    spaces = Spaces(env.observation_space, env.action_space)
    context = Context("host", 0, 0, 0, config, spaces, (), folder, "ipc://x", folder, 0.0)
    supervisor = Supervisor(context, engine, world, told.append)  # type: ignore[arg-type]
    for index, name in enumerate(names):
        supervisor.start(name, "role", index)
    return SimpleNamespace(clock=clock, engine=engine, world=world, told=told, supervisor=supervisor, folder=folder)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return make_scene(tmp_path, monkeypatch, TrainConfig(), "actor-0")


@pytest.fixture
def learners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two learners in the middle of a batch."""
    (tmp_path / "logs").mkdir()
    config = replace(TrainConfig(), **{"learner.num_learners": 2})
    scene = make_scene(tmp_path, monkeypatch, config, *config.learner_names)
    show(scene, 5)
    return scene


@pytest.mark.parametrize(("hang_timeout_s", "start_timeout_s"), [(HANG_S, 120.0), (5.0, 20.0), (0.5, 10.0)])
def test_a_role_has_time_to_begin_that_follows_the_hang_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang_timeout_s: float, start_timeout_s: float
) -> None:
    config = replace(TrainConfig(), **{"supervision.hang_timeout_s": hang_timeout_s})
    scene = make_scene(tmp_path, monkeypatch, config, "actor-0")
    show(scene, 0)  # it has joined, and is still importing
    watch(scene, start_timeout_s)
    assert not scene.engine.signals
    watch(scene, 1.0)
    assert scene.engine.signals == [signal.SIGUSR1, signal.SIGKILL]


def test_one_that_stands_still_is_killed_once(scene: Any) -> None:
    show(scene, 5)
    watch(scene, HANG_S)
    assert not scene.engine.signals
    scene.clock.now += 1.0
    for _ in range(3):  # its exit takes a while
        scene.supervisor.look()
    assert scene.engine.signals == [signal.SIGUSR1, signal.SIGKILL]
    assert "actor-0 made no progress for 31.0 s; killing it" in scene.told[0]


def test_nobody_is_judged_by_the_time_that_the_supervisor_was_stopped(scene: Any) -> None:
    """As by Ctrl-Z: progress that the roles made in the meantime is read after the first look."""
    show(scene, 5)
    watch(scene, HANG_S - 2.0)
    scene.clock.now += 10 * HANG_S
    scene.supervisor.look()
    assert not scene.engine.signals
    watch(scene, 2.0)
    assert scene.engine.signals == [signal.SIGUSR1, signal.SIGKILL], "the time before counts"


def test_a_supervisor_that_looks_seldom_still_notices(scene: Any) -> None:
    """As with a user policy that learns for seconds in the same process."""
    show(scene, 5)
    for _ in range(int(HANG_S) + 1):
        assert not scene.engine.signals
        scene.clock.now += 5.0
        scene.supervisor.look()
    assert scene.engine.signals == [signal.SIGUSR1, signal.SIGKILL]


def test_one_that_left_is_given_the_same_time_to_close(scene: Any) -> None:
    """However long it ran before: its silence begins with its last progress."""
    for progress in range(1, 100):
        watch(scene, 1.0)
        show(scene, progress)
    watch(scene, HANG_S)
    assert not scene.engine.signals
    watch(scene, 1.0)
    assert scene.engine.signals == [signal.SIGUSR1, signal.SIGKILL]


def test_a_role_of_a_host_that_is_not_heard_is_not_hung(scene: Any) -> None:
    """Its progress does not arrive; the engine decides whether the host is lost."""
    show(scene, 5)
    scene.engine.host, scene.engine.is_heard = "second", False
    watch(scene, 3 * HANG_S)
    assert not scene.engine.signals
    scene.engine.is_heard = True
    watch(scene, HANG_S)
    assert not scene.engine.signals
    watch(scene, 2.0)
    assert scene.engine.signals == [signal.SIGUSR1, signal.SIGKILL]
    assert "logs/actor-0.log" in scene.told[0]


def test_a_successor_is_not_judged_by_its_predecessor(scene: Any) -> None:
    show(scene, 5)
    watch(scene, HANG_S + 1.0)
    scene.supervisor.replace(Exit("actor-0", 7, -1, signal.SIGKILL))
    scene.engine.signals.clear()
    scene.engine.process = 8
    show(scene, 6)  # the last value of the dead role
    watch(scene, HANG_S + 1.0)
    assert not scene.engine.signals, "it has not begun yet"
    show(scene, 1, incarnation=1)
    watch(scene, HANG_S)
    assert not scene.engine.signals
    watch(scene, 1.0)
    assert scene.engine.signals == [signal.SIGUSR1, signal.SIGKILL]
    assert [spec.config["incarnation"] for spec in scene.engine.started] == [0, 1]
    assert scene.supervisor.restarts == 1


IN_EXCHANGE = 'Current thread:\n  File "echelon/roles/learners.py", line 66 in _finish'
ELSEWHERE = 'Current thread:\n  File "net.py", line 3 in forward'


@pytest.mark.parametrize(
    ("stacks", "killed"),
    [
        (["", IN_EXCHANGE], ["learner-0"]),
        ([IN_EXCHANGE, ""], ["learner-1"]),
        ([IN_EXCHANGE, ELSEWHERE], ["learner-1"]),
        ([ELSEWHERE, ""], ["learner-1"]),
        ([IN_EXCHANGE, IN_EXCHANGE], ["learner-0", "learner-1"]),
    ],
)
def test_of_learners_that_stand_still_the_one_is_blamed_that_the_others_wait_for(
    learners: Any, stacks: list[str], killed: list[str]
) -> None:
    logs = [learners.folder / "logs" / f"learner-{index}.log" for index in range(2)]
    learners.engine.stacks = {log: stack for log, stack in zip(logs, stacks, strict=True) if stack}
    watch(learners, HANG_S + 1.0)
    learners.supervisor.look()
    assert learners.engine.killed == killed
    assert [text.partition(" made no progress")[0] for text in learners.told] == killed
    watch(learners, module.LEAVE_S + 0.1)
    assert sorted(learners.engine.killed) == ["learner-0", "learner-1"], "the others did not exit by themselves"
    assert len(learners.told) == len(killed), "and nothing is reported about them"


def test_a_learner_may_save_for_as_long_as_it_makes_progress(learners: Any) -> None:
    gauge, phases = Gauge(learners.folder, "learner-0"), dict.fromkeys(PHASES, 0.0)
    learners.supervisor.replace(Exit("learner-1", 7, -1, signal.SIGKILL))
    for progress in range(6, 30):
        gauge.show(progress, phases)
        watch(learners, module.LEAVE_S / 2)
    assert "learner-0" not in learners.engine.killed
    watch(learners, module.LEAVE_S + 0.1)
    assert "learner-0" in learners.engine.killed


def test_failures_of_learners_count_together(learners: Any) -> None:
    """The third failure ends the run, whichever learner it is."""
    failure = Failure("ValueError", "x", 'File "net.py", line 7, in forward', expected=False)

    def fail(index: int) -> None:
        learners.supervisor.replace(Exit(f"learner-{1 - index}", 7, -1, signal.SIGKILL))
        learners.supervisor.replace(Exit(f"learner-{index}", 7, 1, 0, failure))

    fail(0)
    fail(1)
    assert "learner-1 (process 7) failed: ValueError: x; starting all 2 learners again" in learners.told[-1]
    with pytest.raises(RunError, match=r"the learners failed 3 times .* \(learner-0 was the last\), so the run ends"):
        fail(0)


def test_who_is_ended_from_outside_again_and_again_is_started_with_growing_pauses(scene: Any) -> None:
    pauses = []
    for _ in range(10):
        begun = scene.clock.now
        scene.supervisor.replace(Exit("actor-0", 7, -1, signal.SIGKILL))
        while len(scene.engine.started) < len(pauses) + 2:
            watch(scene, 1.0)
        pauses.append(scene.clock.now - begun)
    assert pauses == [0.0, 0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert "actor-0 (process 7) was ended by SIGKILL; starting it again" in scene.told[0]
    assert "was ended by SIGKILL, 5 times within 5 minutes; starting it again in 2 s" in scene.told[4]
    scene.clock.now += 2 * module.DEATH_WINDOW_S
    scene.supervisor.look()
    scene.supervisor.replace(Exit("actor-0", 7, -1, signal.SIGKILL))
    assert len(scene.engine.started) == 12, "immediately: earlier deaths are outside the window"


def test_memory_that_ran_out_is_named(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "num_out_of_memory", lambda: 1_000_000)
    scene.supervisor.replace(Exit("actor-0", 7, -1, signal.SIGKILL))
    scene.supervisor.replace(Exit("actor-0", 7, -1, signal.SIGKILL))
    assert ["memory ran out" in text for text in scene.told] == [True, False]


def test_who_ends_with_the_fork_server_is_told_of_once(scene: Any) -> None:
    scene.supervisor.start("actor-1", "role", 1)
    for name in ("actor-0", "actor-1"):
        scene.supervisor.replace(Exit(name, 7, -1, signal.SIGKILL, ended_with="the fork server ended"))
    assert scene.told == ["the fork server ended, and every role with it; starting them again"]
    assert [spec.name for spec in scene.engine.started[2:]] == ["actor-0", "actor-1"]
    assert scene.supervisor.restarts == 1


def test_a_loss_that_the_engine_has_reported_is_counted_alone(scene: Any) -> None:
    gone = Exit("actor-0", 7, -1, signal.SIGKILL, ended_with="host beta is lost", is_reported=True)
    scene.supervisor.replace(gone)
    assert scene.told == [] and scene.supervisor.restarts == 1 and len(scene.engine.started) == 2


def test_an_error_of_another_host_names_it(scene: Any) -> None:
    scene.engine.host = "beta"
    failure = Failure("EnvError", "the robot fell", "", expected=True)
    with pytest.raises(EnvError, match="actor-0 on host beta: the robot fell"):
        scene.supervisor.replace(Exit("actor-0", 7, 1, 0, failure))


def test_several_that_hang_are_asked_at_once(learners: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def ask(names: list[str]) -> dict[str, str]:
        asked.append(names)
        return dict.fromkeys(names, "")

    monkeypatch.setattr(learners.supervisor, "_stacks", ask)
    learners.supervisor.start("actor-0", "actor", 0)
    show(learners, 5)
    watch(learners, HANG_S + 1.0)
    assert asked == [["actor-0", "learner-0", "learner-1"]]


def test_the_roles_that_have_begun_are_counted_by_kind_without_the_evaluator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make_scene(tmp_path, monkeypatch, TrainConfig())
    supervisor = scene.supervisor
    for name, kind in (("actor-0", "actor"), ("actor-1", "actor"), ("actor-2", "actor"), ("evaluator", "evaluator")):
        supervisor.start(name, kind, 0)

    def begin(name: str, env_steps: int) -> None:
        gauge = Gauge(scene.folder, name)
        gauge.begin(0)
        gauge.show(1, dict.fromkeys(PHASES, 0.0), env_steps)
        supervisor.look()

    begin("actor-0", 300)
    begin("actor-2", 200)
    assert (supervisor.starting(), supervisor.num_steps()) == ("2 of 3 actors", 500)
    begin("actor-1", 50)
    assert (supervisor.starting(), supervisor.num_steps()) == ("", 550)


def test_processes_are_written_down(scene: Any) -> None:
    scene.supervisor.look()
    record = json.loads((scene.folder / PROCESSES).read_text())
    assert record["actor-0"] == {"pid": 7, "incarnation": 0}
    assert record["forkserver"] == {"pid": 2}
    scene.engine.process = None
    scene.supervisor.look()
    assert "actor-0" not in json.loads((scene.folder / PROCESSES).read_text())


def test_a_full_disk_does_not_end_the_run(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    scene.supervisor.look()
    scene.engine.process = 8
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        scene.supervisor.look()
    scene.supervisor.look()
    assert json.loads((scene.folder / PROCESSES).read_text())["actor-0"] == {"pid": 8, "incarnation": 0}


def test_a_failure_is_the_same_when_it_comes_from_the_same_line() -> None:
    def failure(message: str, line: int) -> Failure:
        trace = f'Traceback:\n  File "role.py", line 3, in step\n  File "net.py", line {line}, in forward\n{message}'
        return Failure("ValueError", message, trace, expected=False)

    assert origin_of(failure("0.123", 7)) == origin_of(failure("0.456", 7))
    assert origin_of(failure("0.123", 7)) != origin_of(failure("0.123", 8))


def test_the_time_of_an_actor_in_a_call_that_does_not_return_is_shown_as_hung(scene: Any) -> None:
    scene.supervisor.start("actor-1", "actor", 1)
    gauge = Gauge(scene.folder, "actor-1")
    gauge.begin(0)
    gauge.show(1, {**dict.fromkeys(PHASES, 0.0), "env": 10.0})
    scene.supervisor.look()
    watch(scene, 10.0)
    assert scene.supervisor.shares()["actor-1"] == {**dict.fromkeys(PHASES, 0.0), "env": 0.5, "hung": 0.5}
    assert "an environment that hangs: 50%" in bottleneck(
        {"learner": {"wait": 1.0}, **scene.supervisor.shares()}, num_cores=8, num_processes=2
    )
    gauge.show(2, {**dict.fromkeys(PHASES, 0.0), "env": 20.0})  # it was slow, and has returned
    scene.supervisor.look()
    assert "hung" not in scene.supervisor.shares()["actor-1"]
