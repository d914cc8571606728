"""Ctrl-C, SIGTERM and a closed output pipe: the first stops a run gracefully, the second immediately; then `resume`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from echelon.interrupts import ECHO_S
from echelon.runs.checkpoint import load_checkpoint, newest_intact
from running import Running, Runs, has_torch, wait_until


def checkpointed_steps(run: Running) -> int:
    found = newest_intact(run.run_dir / "checkpoints")
    assert found is not None
    steps: int = load_checkpoint(found[0])["counters"]["env_steps"]
    return steps


def assert_stopped(run: Running, number: int = signal.SIGINT) -> int:
    """Checks that the run stopped gracefully because of the signal `number`; returns its number of steps."""
    assert run.code() == 128 + number, run.text()
    assert "stopping: writing the final checkpoint" in run.text()
    assert f"echelon resume {run.run_dir}" in run.text()
    run.assert_nothing_left()
    summary = run.summary()
    assert (summary["status"], summary["restarts"]) == ("stopped", 0)
    assert summary["env_steps"] == checkpointed_steps(run) > 0
    return int(summary["env_steps"])


def test_once_stops_in_good_order_and_resumes_in_a_coordinator_without_torch(runs: Runs) -> None:
    run = runs.train(fresh=True)
    run.until_learning()
    assert has_torch(run.pid("learner")) and not has_torch(run.pid("coordinator"))
    run.process.send_signal(signal.SIGINT)
    done, rows = assert_stopped(run), len(run.rows())
    again = runs.resume(done + 10_000, fresh=True)
    assert not has_torch(again.pid("coordinator"))
    assert again.code() == 0, again.text()
    again.assert_nothing_left()
    assert again.rows()[rows]["env_steps"] >= done  # the first row it writes continues from there
    assert again.summary()["status"] == "finished"
    assert done + 10_000 <= again.summary()["env_steps"] < done + 20_000


@pytest.mark.parametrize("how", ["SIGHUP", "SIGINT to the group", "SIGTERM and its echo", "SIGTERM to every process"])
def test_so_do_other_ways_to_say_it(runs: Runs, how: str) -> None:
    run = runs.train()
    run.until_learning()
    number = signal.Signals[how.split()[0]]
    if how == "SIGHUP":
        run.process.send_signal(signal.SIGHUP)
    elif how.endswith("every process"):  # as systemd and Slurm do
        for role in ("forkserver", "learner", "actor-0", "actor-1", "coordinator"):
            os.kill(run.pid(role), signal.SIGTERM)
    elif how.startswith("SIGTERM"):
        for _ in how.split("and"):  # `timeout` signals the process and then its group
            run.process.send_signal(signal.SIGTERM)
    else:
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
    assert_stopped(run, number)


def test_so_does_a_reader_that_leaves(runs: Runs) -> None:
    """As `echelon train … | head` does; what is said then goes to stderr."""
    run_dir = runs.folder / "run"
    words = ["--actor.envs=8", "--steps=1000000000", f"--run-dir={run_dir}", f"--shm-dir={runs.shm_dir}"]
    head = ("bash", "-c", 'set -o pipefail; "$@" | grep -m 1 " -> "', "bash")
    run = Running(run_dir, runs.shm_dir, "train", "impala", "CartPole-v1", *words, before=head, fresh=True)
    runs.started.append(run)
    assert run.code() == 141, run.text()
    *_, title, last = run.text().splitlines()
    assert str(run_dir) in title
    assert last == "echelon: nobody reads the output, so the run stops: writing the final checkpoint"
    run.assert_nothing_left()
    assert run.summary()["status"] == "stopped"
    assert run.summary()["env_steps"] == checkpointed_steps(run)


@pytest.mark.parametrize("engine", ["local", "inline"])
def test_a_reader_that_stalls_stops_nothing(runs: Runs, engine: str) -> None:
    """As `echelon train … | sleep 1000` does: roles are supervised, metrics are written, Ctrl-C is heard."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"\n"):
            pass
    os.set_blocking(writer, True)
    run = runs.train(engine=engine, stdout=writer)
    os.close(writer)
    run.until_learning()
    if engine == "local":
        pid = run.kill("actor-0")
        assert run.pid("actor-0", besides=pid) != pid
        run.until_acting(0)
    run.until_learning()
    assert run.stop()["status"] == "stopped"
    os.close(reader)


def test_twice_leaves_at_once(runs: Runs) -> None:
    run = runs.train(env="unruly:SlowEnv", **{"env-kwargs": '{"step_s": 0.2}', "actor.envs": 1})
    run.until_acting(0)
    pid = run.kill("learner", signal.SIGSTOP)  # so that a graceful stop takes long
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "interrupt again" in run.text(), "the first interrupt is heard")
    assert run.pid("learner") == pid
    time.sleep(ECHO_S)  # an earlier signal counts as an echo of the first
    run.process.send_signal(signal.SIGINT)
    assert run.code() == 130, run.text()
    run.assert_nothing_left()


def catches_interrupts(run: Running) -> bool:
    """Whether the process has a handler for SIGINT, as every Python program has at first."""
    status = Path(f"/proc/{run.process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> signal.SIGINT - 1 & 1)


def test_while_starting(runs: Runs) -> None:
    """At any moment of its start, the first signal ends a run, without a traceback."""

    def start(name: str) -> Running:
        words = {"steps": 10**9, "actor.envs": 8}
        runs.started.append(
            run := Running.train("impala", "CartPole-v1", runs.folder / name, runs.shm_dir, fresh=True, **words)
        )
        wait_until(lambda: catches_interrupts(run), "Python has started")
        return run

    early = start("early")
    wait_until(lambda: not catches_interrupts(early) or early.text(), "the command has started")
    early.process.send_signal(signal.SIGINT)
    later = [(start(str(number)), signal.SIGINT, 0.2 * number) for number in range(3)]
    for run, number, delay_s in [*later, (start("terminated"), signal.SIGTERM, 0.1)]:
        run.until(lambda run=run: "preparing" in run.text(), "the run has started")
        time.sleep(delay_s)
        run.process.send_signal(number)
        assert run.code() == 128 + number, run.text()
        assert "Traceback" not in run.text() and "ignored" not in run.text(), run.text()
    assert early.code() in (130, -signal.SIGINT) and "Traceback" not in early.text(), early.text()
    run.assert_nothing_left()


def test_stop_reaches_a_learner_that_is_just_being_replaced(runs: Runs) -> None:
    run = runs.train(**{"run.checkpoint_interval_s": 0.2})
    run.until(lambda: list((run.run_dir / "checkpoints").glob("step_*")), "there is a checkpoint")
    run.kill("learner")
    run.process.send_signal(signal.SIGINT)
    assert run.code() == 130, run.text()
    assert run.summary()["status"] == "stopped"
    assert run.summary()["env_steps"] == checkpointed_steps(run)
    run.assert_nothing_left()
