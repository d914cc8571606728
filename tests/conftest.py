"""What the tests of several folders share."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

import toy_envs as toy
import warm
from call_peers import ends as ends
from call_peers import form as form
from call_peers import make_ends as make_ends
from call_peers import make_peers as make_peers
from call_peers import peers as peers
from echelon.cli.main import main
from echelon.config import replace
from echelon.engines import local
from echelon.presets import preset
from echelon.runs import report
from echelon.runs.report import drawn_curve
from entrance import make_entrance as make_entrance
from hosts import site as site
from hosts import two_hosts as two_hosts
from ray_nodes import nodes as nodes
from running import Runs
from stage import Stage
from telling import Command, Told, children

settings.register_profile("unhurried", deadline=None)  # how long an example takes, a busy machine decides
settings.load_profile("unhurried")


guard: warm.Guard | None = None  # of the whole run, in its first process
received, noted = os.pipe()  # the numbers of the signals that the first process receives, also where a training does


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart() -> None:
    global guard
    if warm.SESSION not in os.environ:  # else this is one of the processes among which the tests are divided
        guard = warm.Guard()
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        for descriptor in (received, noted):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(noted, warn_on_full_buffer=False)
    warm.install()
    warm.skip_curves()
    torch.set_num_threads(1)  # several tests run at a time, and torch's threads wait by spinning


@pytest.hookimpl(tryfirst=True)  # before xdist writes the groups into the names of the tests
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Tests that share what is made once for their file run in one process; mypy, which takes long, comes first.

    Then what is told of the warm process: a system short of memory takes back what nobody used for long.
    """
    items.sort(key=lambda item: {"test_types": 0, "test_warm": 1}.get(item.path.stem, 2))
    for item in items:
        for name, definitions in item._fixtureinfo.name2fixturedefs.items():
            if definitions[-1].scope == "module":
                which = item.callspec.params.get(name) if hasattr(item, "callspec") else None
                item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}-{name}-{which}"))


def pytest_runtest_logfinish() -> None:
    """Ends the run of the tests after one whose training was stopped by a signal: it was meant for all of them."""
    with contextlib.suppress(BlockingIOError):
        if guard is not None and {signal.SIGINT, signal.SIGTERM} & {*os.read(received, 4096)}:
            raise KeyboardInterrupt


def pytest_keyboard_interrupt() -> None:
    if guard is not None:
        guard.close(at_once=True)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    yield
    if guard is not None and (left := guard.close().strip()) and session.exitstatus == pytest.ExitCode.OK:
        print(f"\nthe tests left behind:\n{left}", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def fresh_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has local engines start fresh interpreters, as outside of the tests."""
    monkeypatch.setattr(local, "subprocess", subprocess)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has runs of this process draw their curve at their end, as outside of the tests."""
    monkeypatch.setattr(report, "drawn_curve", drawn_curve)


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A folder in shared memory; a short name, as sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="t-", dir=warm.session()))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def runs(tmp_path: Path, shm_dir: Path) -> Iterator[Runs]:
    runs = Runs(tmp_path, shm_dir)
    yield runs
    for run in runs.started:
        run.close()


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    stages: list[Stage] = []

    def make(env: Any = toy.CounterEnv, name: str = "impala", **fields: Any) -> Stage:
        base = {"env.id": env, "engine": "inline", "actor.envs": 2, "actor.trajectory": 4, "network.hidden": (8,)}
        stages.append(Stage(tmp_path, replace(preset(name, "CartPole-v1"), **{**base, **fields})))
        return stages[-1]

    yield make
    for stage in stages:
        stage.close()


def sessions() -> set[Path]:
    """The shared memory of this process's runs, where no other folder was named."""
    return set(Path("/dev/shm").glob(f"echelon-{os.getpid()}-*"))


@pytest.fixture
def command(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """Runs a command in an empty folder; afterwards no process and no shared memory may be left."""
    monkeypatch.chdir(tmp_path)
    before = children() | sessions()  # what others left may end meanwhile

    def run(*arguments: str) -> Told:
        capfd.readouterr()
        where = ["--shm-dir", str(shm_dir)] if arguments[:1] == ("train",) and "--shm-dir" not in arguments else []
        code = main([*arguments, *where])
        out, err = capfd.readouterr()
        assert list(shm_dir.iterdir()) == []
        assert children() | sessions() <= before
        return Told(code, out, err)

    yield run
