"""If one of several learners dies or is suspended, all resume from the newest checkpoint and nothing is left behind."""

from __future__ import annotations

import re
import signal
import time
from typing import Any

import pytest

from echelon.roles.supervisor import EXCHANGE
from running import Running, Runs


def until_saved(run: Running) -> None:
    run.until(lambda: list((run.run_dir / "checkpoints").glob("step_*")), "there is a checkpoint")


def stop(run: Running) -> dict[str, Any]:
    run.process.send_signal(signal.SIGINT)
    assert run.code() == 130, run.text()
    run.assert_nothing_left()
    assert "Traceback" not in run.text()
    return run.summary()


@pytest.mark.parametrize("name", ["learner-0", "learner-1"])
def test_killed_learner_takes_the_others_along_and_all_go_on(runs: Runs, name: str) -> None:
    run = runs.train("ppo", learners=2, **{"run.checkpoint_interval_s": 0.2, "actor.trajectory": 16})
    until_saved(run)
    run.until_learning()
    pids, actors = [run.pid("learner-0"), run.pid("learner-1")], [run.pid("actor-0"), run.pid("actor-1")]
    run.kill(name)
    began = time.monotonic()
    for index, pid in enumerate(pids):
        assert run.pid(f"learner-{index}", besides=pid)
    started = time.monotonic()
    run.until_learning()
    learning_s = time.monotonic() - began
    print(f"measured: learners started again {started - began:.2f} s after the kill, learning {learning_s:.2f} s")
    assert f"{name} (process {pids[int(name[-1])]}) was ended by SIGKILL; starting all 2 learners again" in run.text()
    assert [run.pid("actor-0"), run.pid("actor-1")] == actors, "the actors only waited"
    versions = [row["version"] for row in run.rows()]
    assert versions == sorted(versions)
    summary = stop(run)
    assert summary["restarts"] == 1
    assert summary["lag_max"] == 0, "of all streams"


@pytest.mark.parametrize("name", ["learner-0", "learner-1"])
def test_stopped_learner_is_found_and_replaced_with_the_others(runs: Runs, name: str) -> None:
    run = runs.train(learners=2, **{"run.checkpoint_interval_s": 0.2, "supervision.hang_timeout_s": 8})
    until_saved(run)
    run.until_learning()
    pids = [run.pid("learner-0"), run.pid("learner-1")]
    run.kill(name, signal.SIGSTOP)
    for index, pid in enumerate(pids):
        assert run.pid(f"learner-{index}", besides=pid)
    run.until_learning()
    assert run.text().count("made no progress") == 1 and f"{name} made no progress" in run.text()
    assert "(none: it is suspended, or stuck in the kernel)" in run.text()
    other = (run.run_dir / "logs" / f"learner-{1 - int(name[-1])}.log").read_text()
    assert re.search(rf'{EXCHANGE}", line \d+ in _finish', other), "by which it was seen to wait"
    assert f"{name} (process {pids[int(name[-1])]}) was ended by SIGKILL; starting all 2 learners again" in run.text()
    assert "the learners resume from step_" in run.text()
    stop(run)


def test_killed_learner_of_a_replay_finds_it_as_it_was(runs: Runs) -> None:
    run = runs.train("apex-dqn", learners=2, **{"run.checkpoint_interval_s": 0.2, "replay.min_size": 512})
    until_saved(run)
    run.until(lambda: any(row["updates"] > 2 for row in run.rows()), "it learns")
    before = run.rows()[-1]
    pids = [run.pid("learner-0"), run.pid("learner-1")]
    run.kill("learner-1")
    for index, pid in enumerate(pids):
        assert run.pid(f"learner-{index}", besides=pid)
    run.until_learning()
    after = run.rows()[-1]
    assert after["env_steps"] >= before["env_steps"] and after["replay.inserted"] >= before["replay.inserted"]
    assert after["replay.size"] >= before["replay.size"], "nothing was lost, and the parts of both are counted"
    stop(run)


def test_killed_while_they_look_for_each_other(runs: Runs) -> None:
    run = runs.train(learners=2)
    pid = run.kill("learner-1")
    assert run.pid("learner-1", besides=pid)
    run.until_learning()
    assert "the learners resume from" in run.text(), "the beginning, unless they had found each other and saved"
    assert stop(run)["restarts"] == 1


def test_interrupt_while_they_start_again(runs: Runs) -> None:
    """The interrupt takes effect once the learners run again: the run stops with a checkpoint as usual."""
    run = runs.train(learners=2, **{"run.checkpoint_interval_s": 0.2})
    until_saved(run)
    run.until_learning()
    run.kill("learner-0")
    summary = stop(run)
    assert summary["status"] == "stopped" and summary["checkpoint"]
