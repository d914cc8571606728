"""What every engine promises, and what processes do to the local one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from echelon.engines import local
from echelon.engines.forkserver import MAX_FAILURE_BYTES, pack_failure
from echelon.engines.inline import InlineEngine
from echelon.engines.local import CLOSE_S, LocalEngine
from echelon.engines.process import IDLE, Exit, Failure, ProcessSpec, failure_of, how_ended
from echelon.envs.vector import EnvFailed, EnvFailure
from echelon.errors import RunError
from running import parent_of, wait_until

Start = Callable[..., Path]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(str(tmp_path / "session"))
    yield engine
    engine.close(0.0)


@pytest.fixture
def start(engine: LocalEngine, tmp_path: Path) -> Start:
    def start(kind: str, name: str = "role", **config: object) -> Path:
        file = tmp_path / name
        config = {"steps": 0, **config, "file": str(file)}
        engine.start(ProcessSpec(name, f"engine_roles:{kind}", config, log=str(tmp_path / f"{name}.log")))
        return file

    return start


def next_exit(engine: LocalEngine) -> Exit:
    (gone,) = wait_until(engine.exits, "a process ended")
    return gone


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(parent: int) -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if parent_of(int(path.name)) == parent]


@pytest.mark.parametrize("log", ["/dev/full", "/dev/full/not a folder"])
def test_a_role_works_though_its_log_cannot_be_written(engine: LocalEngine, tmp_path: Path, log: str) -> None:
    file = tmp_path / "role"
    engine.start(ProcessSpec("role", "engine_roles:Talking", {"steps": 3, "file": str(file)}, log=log))
    gone = next_exit(engine)
    assert (gone.code, gone.signal, gone.failure) == (0, 0, None)
    assert file.read_text() == "3" and file.with_suffix(".closed").exists()
    engine.start(ProcessSpec("role", "engine_roles:Raising", {"message": "seven", "file": str(file)}, log=log))
    failure = next_exit(engine).failure
    assert failure is not None and (failure.kind, failure.message) == ("ValueError", "seven")


@pytest.mark.parametrize("how", ["forked", "fresh"])
def test_a_role_runs_to_its_end_on_every_engine(how: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if how == "fresh":
        request.getfixturevalue("fresh_engines")
    engine: LocalEngine = request.getfixturevalue("engine")
    inline = InlineEngine()
    for number, each in enumerate((inline, engine)):
        file = tmp_path / str(number)
        each.start(ProcessSpec("role", "engine_roles:Counting", {"steps": 3, "file": str(file)}))
        exits: list[Exit] = []

        def ended(each: InlineEngine | LocalEngine = each, exits: list[Exit] = exits) -> bool:
            if isinstance(each, InlineEngine):
                each.turn()
            exits += each.exits()
            return bool(exits)

        wait_until(ended, "the role ended")
        assert [(gone.name, gone.code, gone.signal, gone.failure) for gone in exits] == [("role", 0, 0, None)]
        assert file.read_text() == "3"
        assert file.with_suffix(".closed").exists()
        assert each.pid("role") is None


def test_a_role_may_yield_to_all_others(engine: LocalEngine, tmp_path: Path) -> None:
    for name, nice in {"normal": 0, "nicer": 7, "idle": IDLE}.items():
        file = tmp_path / name
        engine.start(ProcessSpec(name, "engine_roles:Counting", {"steps": 0, "file": str(file)}, nice=nice))
        wait_until(file.exists, "it works")  # after it has set its priority
    wait_until(lambda: (engine.exits(), engine.pid("idle"))[1], "all are known")
    pids = [engine.pid(name) or 0 for name in ("normal", "nicer", "idle")]
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert [os.getpriority(os.PRIO_PROCESS, pid) - own for pid in pids] == [0, 7, 0]
    assert [os.sched_getscheduler(pid) == os.SCHED_IDLE for pid in pids] == [False, False, True]


def test_an_exception_is_told_with_its_traceback(engine: LocalEngine, start: Start, tmp_path: Path) -> None:
    file = start("Raising", message="seven is too many")
    gone = next_exit(engine)
    assert gone.code == 1 and gone.failure is not None
    assert (gone.failure.kind, gone.failure.message, gone.failure.expected) == (
        "ValueError",
        "seven is too many",
        False,
    )
    assert 'raise ValueError(self.config["message"])' in gone.failure.traceback
    assert "seven is too many" in (tmp_path / "role.log").read_text()
    assert file.with_suffix(".closed").exists()


def test_an_exception_of_the_entry_is_told_too(engine: LocalEngine, start: Start) -> None:
    start("refuse")
    failure = next_exit(engine).failure
    assert failure is not None and failure.message == "made wrongly"


@pytest.mark.parametrize("letter", ["x", "墙", "\0", "\U0001f9f1"])
def test_a_huge_message_is_cut_and_still_told(engine: LocalEngine, start: Start, letter: str) -> None:
    start("Raising", message=letter * 100_000)
    failure = next_exit(engine).failure
    assert failure is not None and failure.kind == "ValueError"
    assert failure.message and set(failure.message) == {letter}
    assert len(pack_failure(failure)) <= MAX_FAILURE_BYTES


def test_an_error_does_not_wait_for_a_role_that_cannot_close(engine: LocalEngine, start: Start) -> None:
    start("RaisingWithoutEnd", message="first this")
    gone = next_exit(engine)
    assert gone.signal == signal.SIGALRM
    assert gone.failure is not None and gone.failure.message == "first this"


def test_signals_are_told(engine: LocalEngine, start: Start, tmp_path: Path) -> None:
    for number in (signal.SIGKILL, signal.SIGSEGV):
        start("Killed", signal=int(number))
        gone = next_exit(engine)
        assert (gone.signal, gone.failure) == (number, None)
    assert "Segmentation fault" in (tmp_path / "role.log").read_text()  # and where, for whoever reads the log


@pytest.mark.parametrize("escape", [False, True])
def test_children_of_a_role_end_with_it_and_hold_nobody_up(engine: LocalEngine, start: Start, escape: bool) -> None:
    file = start("Parent", children_escape=escape)
    assert next_exit(engine).signal == signal.SIGKILL
    for pid in map(int, file.read_text().split()):
        if escape:  # it wanted to live on, and does; what it holds open must not matter
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not is_alive(pid), "the child is gone")
    start("Counting", "next", steps=1)
    assert next_exit(engine).code == 0


@pytest.mark.parametrize(("code", "text"), [(3, "left with code 3"), (-9, "was ended by SIGKILL"), (-35, "signal 35")])
def test_how_a_process_ended_is_said_for_every_signal(code: int, text: str) -> None:
    assert text in how_ended(code)


def test_a_server_that_is_still_importing_does_not_delay_its_end(tmp_path: Path) -> None:
    engine = LocalEngine(str(tmp_path), ("slow_import",))
    engine.start(ProcessSpec("late", "engine_roles:count", {}))
    begun = time.monotonic()
    engine.close(0.0)
    assert time.monotonic() - begun < CLOSE_S


def test_a_role_leaves_sigterm_to_the_coordinator_but_its_children_do_not(engine: LocalEngine, start: Start) -> None:
    start("Counting", "led")
    wait_until(lambda: (engine.exits(), engine.pid("led"))[1], "it runs")
    for number in (signal.SIGTERM, signal.SIGHUP):
        engine.signal("led", number)
    children = start("Patron", "patron")
    assert next_exit(engine).name == "patron" and children.read_text() == "-15 -15"
    assert engine.pid("led") is not None


def test_signal_reaches_the_named_role(engine: LocalEngine, start: Start) -> None:
    files = [start("Counting", name) for name in ("one", "two")]
    wait_until(lambda: all(file.exists() for file in files) and engine.exits() == [], "both run")
    wait_until(lambda: (engine.exits(), engine.pid("two"))[1], "both are known")
    engine.signal("one", signal.SIGUSR2)
    gone = next_exit(engine)
    assert (gone.name, gone.signal) == ("one", signal.SIGUSR2)
    assert engine.pid("one") is None
    assert is_alive(engine.pid("two") or 0)
    engine.signal("one", signal.SIGUSR2)  # gone already: nothing happens
    start("Counting", "three", steps=1)
    assert next_exit(engine).name == "three"


def test_close_ends_the_roles_and_the_server(engine: LocalEngine, start: Start) -> None:
    start("Counting")
    pid = wait_until(lambda: (engine.exits(), engine.pid("role"))[1], "it runs")
    assert pid is not None and parent_of(pid) == engine.server_pid
    engine.close(0.0)
    assert not is_alive(pid)
    assert not is_alive(engine.server_pid)
    engine.close(0.0)  # twice is once


def test_who_leaves_while_the_engine_is_closing_is_told(engine: LocalEngine, start: Start) -> None:
    start("Counting", steps=1000)
    wait_until(lambda: (engine._receive(0.0), engine.pid("role") or engine._exits)[1], "the role runs, or has left")
    engine.close(60.0)
    assert [(gone.name, gone.code) for gone in engine.exits()] == [("role", 0)]
    assert engine.exits() == []


def test_a_killed_server_takes_the_roles_with_it_and_is_replaced(engine: LocalEngine, start: Start) -> None:
    files = [start("Counting", name) for name in ("one", "two")]
    wait_until(lambda: all(file.exists() for file in files) and engine.exits() == [], "both run")
    pids = wait_until(lambda: (engine.exits(), {engine.pid("one"), engine.pid("two")} - {None})[1], "they are known")
    server = engine.server_pid
    os.kill(server, signal.SIGKILL)
    gone = wait_until(engine.exits, "the loss is told")
    assert not any(is_alive(pid or 0) for pid in pids), "told when all have ended"
    assert {one.name for one in gone} == {"one", "two"}
    assert {one.ended_with for one in gone} == {f"the fork server (process {server}) was ended by SIGKILL"}
    assert engine.pid("one") is None and engine.descriptors == []
    start("Counting", "three", steps=1)
    assert next_exit(engine).name == "three" and engine.server_pid != server


def test_the_spare_of_a_killed_server_takes_over(engine: LocalEngine, start: Start) -> None:
    """It is an idle fork of the server; if both are killed, a new server starts."""
    servers = []
    for kill_spare in (False, False, True, False):
        start("Counting")
        role = wait_until(lambda: (engine.exits(), engine.pid("role"))[1], "it runs")
        servers.append(engine.server_pid)
        (spare,) = [pid for pid in children_of(engine.server_pid) if pid != role]
        for pid in [spare, engine.server_pid] if kill_spare else [engine.server_pid]:
            os.kill(pid, signal.SIGKILL)
        assert [one.name for one in wait_until(engine.exits, "the loss is told")] == ["role"]
        start("Counting", "next", steps=1)
        assert next_exit(engine).name == "next"
        assert (engine.server_pid == spare) is not kill_spare
    assert len({*servers, engine.server_pid}) == 5
    engine.close(0.0)
    assert not is_alive(engine.server_pid)


def test_a_spare_that_is_too_slow_takes_nothing_away(
    engine: LocalEngine, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It wakes up when another server runs, finds that the engine has given it up, and leaves the session alone."""
    monkeypatch.setattr(local, "PROMOTION_S", 0.2)
    (session := tmp_path / "session").mkdir()
    start("Counting")
    role = wait_until(lambda: (engine.exits(), engine.pid("role"))[1], "it runs")
    (spare,) = [pid for pid in children_of(engine.server_pid) if pid != role]
    os.kill(spare, signal.SIGSTOP)
    os.kill(engine.server_pid, signal.SIGKILL)
    wait_until(engine.exits, "the loss is told")
    start("Counting", "next", steps=1)
    os.kill(spare, signal.SIGCONT)
    assert next_exit(engine).name == "next" and engine.server_pid != spare
    wait_until(lambda: not is_alive(spare), "the late one has gone")
    assert session.is_dir()
    start("Counting", "last", steps=1)
    assert next_exit(engine).name == "last"


def test_who_was_to_be_started_by_a_killed_server_is_told_too(engine: LocalEngine, start: Start) -> None:
    start("Counting")
    wait_until(lambda: (engine.exits(), engine.pid("role"))[1], "it runs")
    os.kill(engine.server_pid, signal.SIGSTOP)
    start("Counting", "never")
    os.kill(engine.server_pid, signal.SIGKILL)
    gone = wait_until(engine.exits, "the loss is told")
    assert [(one.name, one.signal) for one in gone] == [("role", signal.SIGKILL), ("never", signal.SIGKILL)]


def test_a_server_that_fails_by_itself_is_an_error(tmp_path: Path) -> None:
    engine = LocalEngine(str(tmp_path / "session"), preload=["there_is_no_such_module"])
    try:
        with pytest.raises(RunError, match="left with code 1, and every process with it"):
            wait_until(engine.exits, "the failure is told")
    finally:
        engine.close(0.0)


def test_failures_go_by_their_name_in_the_exception_tree() -> None:
    error = EnvFailed(EnvFailure(3, 7, 2, "RuntimeError: no", "Traceback: no"), 4, "Mend it.")
    failure = failure_of(error)
    assert (failure.kind, failure.expected) == ("EnvError", True)
    assert failure_of(KeyError("x")) == Failure("KeyError", "'x'", "KeyError: 'x'\n", False)
