"""A run folder that becomes full or read-only: training goes on, and nothing that was checkpointed is lost."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.errors import ConfigError
from echelon.runs.checkpoint import load_checkpoint, newest_intact
from echelon.runs.metrics import METRICS, read_rows
from running import Running, Runs
from telling import Command

FIELDS = {"run.checkpoint-interval-s": 0.2, "run.keep-checkpoints": 1}
BEGINS, ENDS = "cannot be written", "is written again"


@pytest.fixture
def disk(runs: Runs) -> Iterator[Path]:
    """A disk of 4 MB for the run folder; the test is skipped where mounting is not permitted."""
    path = runs.folder / "run"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    yield path
    for run in runs.started:
        run.close()
    while subprocess.run(["umount", "-l", path], capture_output=True).returncode == 0:
        pass


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere"
    path.mkdir()
    return path


def fill(disk: Path) -> Path:
    """Fills the disk to its last byte; returns the file to remove."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(512)):
            pass
    return ballast


def make_read_only(disk: Path) -> None:
    """Makes what is opened from now on read-only, as the kernel does to a disk that fails."""
    subprocess.run(["mount", "--bind", disk, disk], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)


def newest_steps(folder: Path) -> int:
    """The environment steps of the newest checkpoint, which must be intact.

    A run that writes several of them a second may remove one while it is read, as older than those it keeps.
    """
    while True:
        found = newest_intact(folder / "checkpoints")
        assert found is not None and not found[1]
        try:
            return int(load_checkpoint(found[0])["counters"]["env_steps"])
        except ConfigError:
            if found[0].exists():
                raise


def started(runs: Runs, engine: str, **fields: object) -> Running:
    run = runs.train(engine=engine, **{**FIELDS, **fields})
    run.until(lambda: len(run.rows()) > 5 and newest_intact(run.run_dir / "checkpoints"), "there is a checkpoint")
    return run


@pytest.mark.parametrize("engine", ["local", "inline"])
def test_one_that_fills_up_and_becomes_free_again(runs: Runs, disk: Path, engine: str) -> None:
    run = started(runs, engine)
    ballast = fill(disk)
    run.until(lambda: BEGINS in run.text(), "it is reported")
    kept = newest_steps(disk)
    if engine == "local":
        for name in ("actor-0", "learner"):
            heads, pid = run.heads(2), run.processes()[name]
            run.kill(name)
            run.until(lambda name=name, pid=pid: f"{name} (process {pid})" in run.text(), f"{name} is replaced")
            run.until(lambda heads=heads: run.heads(2)[0] > heads[0] + 2, "actors act")
        assert f"({kept:,} steps)" in run.text(), "the learner goes on from the last checkpoint"
    ballast.unlink()
    run.until(lambda: ENDS in run.text(), "the end is reported")
    run.until(lambda: newest_steps(disk) > kept, "there is a newer checkpoint")
    run.stop()
    assert (run.text().count(BEGINS), run.text().count(ENDS)) == (1, 1) and "Traceback" not in run.text()
    walls = [row["wall_s"] for row in run.rows()]  # every row that waited is there
    assert walls == sorted(walls) and max(b - a for a, b in itertools.pairwise(walls)) < 5.0


@pytest.mark.parametrize("engine", ["local", "inline"])
def test_one_that_is_full_at_the_end(runs: Runs, disk: Path, elsewhere: Path, engine: str) -> None:
    run = started(runs, engine, **{"run.fallback-dir": elsewhere})
    fill(disk)
    kept = newest_steps(disk)
    run.until(lambda: BEGINS in run.text(), "it is reported")
    run.process.send_signal(signal.SIGINT)
    assert run.code() == 1
    (folder,) = elsewhere.iterdir()
    (sentence,) = [line for line in run.text().splitlines() if line.startswith("echelon: ")]
    assert str(disk) in sentence and str(folder) in sentence and "Traceback" not in run.text()
    steps = json.loads((folder / "summary.json").read_text())["env_steps"]
    assert newest_steps(folder) == steps > kept == newest_steps(disk), "both are complete"
    rows = [row for place in (disk, folder) if (place / METRICS).exists() for row in read_rows(place)]
    assert rows[-1]["env_steps"] == steps and folder.stat().st_mode & 0o777 == 0o700
    run.assert_nothing_left()
    if engine == "local":
        again = Running.resume(folder, runs.shm_dir, steps + 2_000)
        runs.started.append(again)
        assert again.code() == 0 and newest_steps(folder) >= steps + 2_000, again.text()


def test_one_that_becomes_read_only(runs: Runs, disk: Path, elsewhere: Path) -> None:
    run = started(runs, "local", **{"run.fallback-dir": elsewhere})
    learner, actor = run.pid("learner"), run.pid("actor-0")
    make_read_only(disk)
    run.until(lambda: BEGINS in run.text(), "it is reported")
    run.kill("actor-0")
    run.until(lambda: f"actor-0 (process {actor})" in run.text(), "its end is noticed")
    run.until_acting(0)  # without a log
    assert run.pid("learner") == learner
    run.process.send_signal(signal.SIGINT)
    assert run.code() == 1 and "Traceback" not in run.text(), run.text()
    (folder,) = elsewhere.iterdir()
    assert newest_steps(folder) == json.loads((folder / "summary.json").read_text())["env_steps"] > newest_steps(disk)
    assert run.text().count(BEGINS) == 1 and ENDS not in run.text()


def test_one_that_is_full_at_the_start(command: Command, disk: Path) -> None:
    fill(disk)
    told = command("train", "impala", "CartPole-v1", "--steps=100", "--engine=inline", f"--run-dir={disk / 'new'}")
    assert told.code == 2 and re.fullmatch(r"echelon: .*cannot be .*\n", told.err), told
    assert not (disk / "new").exists() and not (disk / METRICS).exists()


def test_a_place_for_the_end_that_is_not_there_is_refused_at_the_start(command: Command) -> None:
    told = command("train", "impala", "CartPole-v1", "--steps=100", "--engine=inline", "--run.fallback-dir=/nowhere")
    assert told.code == 2 and "run.fallback_dir=/nowhere" in told.err, told
