"""What the tests of several folders share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import toy_envs as toy
from echelon.cli.main import main
from echelon.config import replace
from echelon.presets import preset
from entrance import make_entrance as make_entrance
from hosts import two_hosts as two_hosts
from running import Runs
from stage import Stage
from telling import Command, Told, children

settings.register_profile("unhurried", deadline=None)  # how long an example takes, a busy machine decides
settings.load_profile("unhurried")


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A folder in shared memory; a short name, as sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="t-", dir="/dev/shm"))
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
