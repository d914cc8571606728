"""Any process of a run with replay may be killed: shards, priorities and counts survive."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echelon.replay.archive import Archive
from echelon.replay.restore import read_header
from running import DEADLINE_S, Running, Runs, wait_until

FIELDS: dict[str, Any] = {
    "acting": "local",
    "actor.num_actors": 2,
    "actor.envs": 4,
    "network.hidden": 16,
    "replay.min_size": 200,
    "replay.batch": 32,
    "replay.samples_per_insert": 4,
    "replay.capacity": 20_000,
    "run.checkpoint_interval_s": 0.2,
}
# Twice a batch plus one append of both actors (4 environments, 3 steps): simultaneous checks may both pass.
BAND = 2 * (32 + 4 * 2 * 12)


def until_learning(run: Running) -> int:
    """Waits until further updates are reported; returns the env steps at that point."""
    seen = len(run.rows())
    before = run.rows()[-1]["replay.sampled"] if seen else 0
    run.until(lambda: any(row["replay.sampled"] > before for row in run.rows()[seen:]), "the learner learns")
    return int(run.rows()[-1]["env_steps"])


def checked(run: Running, restarts: int) -> None:
    """Interrupts the run once it is long enough for its sampling ratio, and checks its record."""
    enough = 200 + BAND * 100 / 4
    run.until(lambda: run.rows()[-1]["replay.inserted"] > enough, "there is enough to count", 2 * DEADLINE_S)
    run.process.send_signal(signal.SIGINT)
    assert run.code() == 130, run.text()
    run.assert_nothing_left()
    rows, summary = run.rows(), run.summary()
    for name in ("env_steps", "episodes", "version"):
        values = [row[name] for row in rows]
        assert values == sorted(values), f"{name} never goes back"
    drawn = [row["replay.sampled"] for row in rows]
    assert drawn == sorted(drawn)
    replay = summary["replay"]
    assert summary["restarts"] == restarts
    assert replay["samples_per_insert"] == pytest.approx(4.0, rel=0.01)
    balance = 4 * (replay["inserted"] - 200) - replay["sampled"]
    assert abs(balance) <= BAND, "the ratio is kept, whoever died"
    assert replay["inserted"] > 200 and summary["env_steps"] > 200


def test_killed_actors_go_on_with_their_shards_and_killed_learners_find_the_replay_as_it_was(runs: Runs) -> None:
    run = runs.train("apex-dqn", **FIELDS)
    run.until(lambda: list((run.run_dir / "checkpoints").glob("step_*")), "there is a checkpoint")
    for name in ("actor-0", "learner", "actor-0", "actor-1", "learner"):
        until_learning(run)
        before = run.rows()[-1]
        pid = run.kill(name)
        assert run.pid(name, besides=pid)
        until_learning(run)
        after = run.rows()[-1]
        assert after["replay.inserted"] >= before["replay.inserted"]
        assert after["replay.size"] >= before["replay.size"], "no transition is lost, and none has to be made again"
    assert run.text().count("the learner resumes from step_") == 2
    checked(run, restarts=5)


def test_killed_coordinator_leaves_a_run_that_goes_on_with_its_replay(runs: Runs) -> None:
    run = runs.train("apex-ddpg", env="Pendulum-v1", **FIELDS, **{"replay.checkpoint": "true"})
    run.until(lambda: list(run.run_dir.glob("replay/step_????????????")), "there is a snapshot")
    until_learning(run)
    run.process.kill()
    run.code()
    (run.run_dir / "processes.json").unlink()  # no process is left to remove it
    run.assert_nothing_left()
    newest = max(run.run_dir.glob("replay/step_????????????"))
    done = max(int(newest.name.removeprefix("step_")), run.rows()[-1]["env_steps"])  # it may have run on, unreported
    kept = sum(read_header(newest)["limiter"]["inserted"])
    again = runs.resume(done + 2_000)
    assert again.code() == 0, again.text()
    assert kept > 0 and again.summary()["replay"]["inserted"] >= kept + 1_900, "they count on from what was kept"
    again.assert_nothing_left()


@pytest.mark.parametrize(
    ("name", "env"), [("dqn", "CartPole-v1"), pytest.param("sac", "Pendulum-v1", marks=pytest.mark.full)]
)
def test_killed_by_turns_while_snapshots_are_written(runs: Runs, name: str, env: str) -> None:
    """Whenever the learner dies, a complete snapshot exists, and the sampling ratio is kept."""
    often = {"replay.checkpoint": "true", "run.checkpoint_interval_s": 0.1, "replay.n_step": 3}
    run = runs.train(name, env=env, **{**FIELDS, **often})
    archive = Archive(run.run_dir / "replay")
    run.until(archive.newest_first, "there is a snapshot")
    for victim in ("learner", "actor-0", "learner"):
        until_learning(run)
        run.process.send_signal(signal.SIGSTOP)  # so that the victim is not replaced yet
        pid = run.kill(victim)
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"{victim} is dead")  # type: ignore[misc]
        if victim == "learner":  # otherwise it keeps writing
            assert read_header(archive.newest_first()[0])["shards"]
        run.process.send_signal(signal.SIGCONT)
        assert run.pid(victim, besides=pid)
    until_learning(run)
    checked(run, restarts=3)
    (newest,) = (run.run_dir / "replay").iterdir()
    assert newest.name == Path(run.summary()["checkpoint"]).name, "nothing half-written is left"
    size = sum(shard["head"] - shard["start"] for shard in read_header(newest)["shards"])
    assert 0 <= run.summary()["replay"]["size"] - size <= BAND, "but for what came while it was written"
    again = runs.resume(run.summary()["env_steps"] + 500)
    assert again.code() == 0, again.text()
    assert f"replay: restored the {size:,} transitions of {newest.name}" in again.text()


def processor_s(pid: int) -> float:
    """Returns the processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def until_asleep(run: Running, name: str) -> None:
    """Waits until a process uses less than a fifth of a core for half a second; a process that spins never does."""

    def sleeps() -> bool:
        pid = run.pid(name)
        before_s, start = processor_s(pid), time.monotonic()
        while time.monotonic() - start < 0.5:
            time.sleep(0.05)
        return processor_s(pid) - before_s < 0.1

    run.until(sleeps, f"{name} sleeps")


def test_who_is_ahead_sleeps_and_whoever_dies_meanwhile_nobody_hangs(runs: Runs) -> None:
    run = runs.train("apex-dqn", **FIELDS, **{"supervision.hang_timeout_s": 600})  # stopped processes are not replaced
    until_learning(run)
    learner = run.kill("learner", signal.SIGSTOP)
    for name in ("actor-0", "actor-1"):
        until_asleep(run, name)  # at the end of the band
    actor = run.kill("actor-0")  # while it waits for room
    assert run.pid("actor-0", besides=actor)
    until_asleep(run, "actor-0")
    os.kill(learner, signal.SIGCONT)
    until_learning(run)
    stopped = [run.kill(name, signal.SIGSTOP) for name in ("actor-0", "actor-1")]
    until_asleep(run, "learner")
    assert run.kill("learner") == learner
    assert run.pid("learner", besides=learner)
    until_asleep(run, "learner")
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    until_learning(run)
    checked(run, restarts=2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB; the test is skipped where mounting is not permitted."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_told_and_training_goes_on(small_disk: Path, shm_dir: Path) -> None:
    runs = Runs(small_disk, shm_dir)
    run = runs.train("apex-dqn", **{**FIELDS, "replay.checkpoint": "true"})
    try:
        run.until(lambda: run.rows() and run.rows()[-1]["replay.size"] > 10_000, "there is something to write")
        ballast = small_disk / "ballast"
        learner = run.kill("learner", signal.SIGSTOP)  # so that the free space does not change
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        ballast.write_bytes(bytes(free - 300_000))
        os.kill(learner, signal.SIGCONT)
        run.until(lambda: "(replay: a snapshot needs" in run.text() or "No space" in run.text(), "it is told")
        assert "Training goes on" in run.text()
        for _ in range(2):
            until_learning(run)
        ballast.unlink()
        before = max(path.name for path in run.run_dir.glob("replay/step_????????????"))
        run.until(lambda: max(p.name for p in run.run_dir.glob("replay/step_*")) > before, "the next one finds room")
        run.until(lambda: "is written again" in run.text(), "that is told, too")
        checked(run, restarts=0)
        assert os.listdir(run.run_dir / "replay") == [Path(run.summary()["checkpoint"]).name]
    finally:
        run.close()
