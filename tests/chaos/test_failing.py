"""Roles that hang or fail by their own doing: replaced while that can help, and told to the user when it cannot."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from running import Runs


def test_stopped_actor_is_taken_for_hung_and_replaced(runs: Runs) -> None:
    run = runs.train(env="unruly:SlowEnv", **{"supervision.hang_timeout_s": 8, "env-kwargs": '{"step_s": 0.001}'})
    run.until_acting(0)
    pid = run.kill("actor-0", signal.SIGSTOP)
    assert run.pid("actor-0", besides=pid)
    run.until_acting(0)
    assert "actor-0 made no progress for" in run.text()
    assert "(none: it is suspended, or stuck in the kernel)" in run.text()
    run.process.send_signal(signal.SIGINT)
    assert run.code() == 130
    assert run.summary()["restarts"] == 1
    run.assert_nothing_left()


def test_environment_that_crashes_when_it_is_made_is_told(runs: Runs) -> None:
    run = runs.train(env="unruly:UnmakeableEnv")
    assert run.code() == 1, run.text()
    assert "the run could not be prepared" in run.text() and "was ended by SIGSEGV" in run.text()
    assert not run.run_dir.exists()


def test_a_preparation_that_is_killed_from_outside_is_repeated(runs: Runs, tmp_path: Path) -> None:
    kwargs = json.dumps({"flag": str(tmp_path / "killed")})
    run = runs.train(env="unruly:KilledOnceEnv", **{"env-kwargs": kwargs, "steps": 2_000})
    assert run.code() == 0, run.text()
    assert (tmp_path / "killed").exists() and run.summary()["restarts"] == 0


def test_hung_environment_shows_its_stack(runs: Runs, tmp_path: Path) -> None:
    kwargs = json.dumps({"flag": str(tmp_path / "hung")})
    run = runs.train(env="unruly:HangingEnv", **{"supervision.hang_timeout_s": 8, "env-kwargs": kwargs})
    run.until(lambda: "made no progress for" in run.text(), "the hang is noticed")
    run.until(lambda: "starting it again" in run.text(), "it is replaced")
    assert "stare_at_the_wall" in run.text()
    run.until_acting(0)
    run.until_acting(1)
    run.process.send_signal(signal.SIGINT)
    assert run.code() == 130
    assert run.summary()["restarts"] == 1


def test_slow_environment_is_left_alone(runs: Runs) -> None:
    """Half a second a step, ten a trajectory, under a hang timeout of eight: nobody is killed."""
    run = runs.train(
        env="unruly:SlowEnv",
        **{
            "env-kwargs": '{"step_s": 0.5}',
            "supervision.hang_timeout_s": 8,
            "actor.envs": 1,
            "actor.trajectory": 20,
            "steps": 40,
        },
    )
    assert run.code() == 0, run.text()
    assert run.summary()["restarts"] == 0
    assert "no progress" not in run.text()


AGAIN = {"actor.num_actors": 1, "supervision.failure_window_s": 600}


def test_same_error_again_and_again_ends_the_run(runs: Runs) -> None:
    run = runs.train(env="toy_envs:CounterEnv", **{"network.name": "unruly:lost_matrix", **AGAIN})
    assert run.code() == 1
    assert run.text().count("; starting it again") == 2
    assert "actor-0 failed 3 times within 600 s with the same error" in run.text()
    assert "RuntimeError: the matrix is lost" in run.text()
    assert re.search(r'unruly\.py", line \d+', run.text())  # the remote traceback
    assert len(re.findall(r"unruly\.py:\d+ in forward: raise .*; starting it again", run.text())) == 2
    assert run.summary()["status"] == "failed"
    assert "the matrix is lost" in run.summary()["error"]
    run.assert_nothing_left()


@pytest.mark.parametrize(("how", "cause"), [(signal.SIGSEGV, "was ended by SIGSEGV"), (0, "left with code 0")])
def test_crashing_again_and_again_ends_the_run(runs: Runs, how: int, cause: str) -> None:
    run = runs.train(env="unruly:CrashingEnv", **{"env-kwargs": json.dumps({"how": how}), **AGAIN})
    assert run.code() == 1
    assert f"actor-0 failed 3 times within 600 s with the same error, so the run ends. {cause}" in run.text()
    assert ("in step" if how else "left with code 0: its log is empty") in run.text()  # the stack of the crash
    run.assert_nothing_left()


@pytest.mark.parametrize("close_hangs", [False, True])
def test_raising_environment_ends_the_run_and_is_told(runs: Runs, tmp_path: Path, close_hangs: bool) -> None:
    flag = tmp_path / "raised"
    kwargs = json.dumps({"flag": str(flag), "close_hangs": close_hangs})
    run = runs.train(env="unruly:RaisingEnv", **{"env-kwargs": kwargs})
    run.until(lambda: "the simulator burnt down" in run.text() and flag.read_text(), "the error is told")
    print(f"measured: told after {time.time() - float(flag.read_text()):.2f} s")
    assert run.code() == 1
    told = run.text()[run.text().index("echelon: ") :]
    assert told.startswith("echelon: actor ")
    for part in (": environment ", "(seed ", "at its step 30", "Traceback", 'raise RuntimeError("the simulator burnt'):
        assert part in told
    assert told.count("Traceback") == 1
    assert run.summary()["status"] == "failed"
    assert "the simulator burnt down" in run.summary()["error"]
    run.assert_nothing_left()


def test_raising_environment_can_be_restarted(runs: Runs, tmp_path: Path) -> None:
    kwargs = json.dumps({"flag": str(tmp_path / "raised")})
    run = runs.train(env="unruly:RaisingEnv", **{"env-kwargs": kwargs, "on-env-error": "restart", "steps": 20_000})
    assert run.code() == 0, run.text()
    assert "raised at its step 30 and was restarted: RuntimeError" in run.text()
    assert run.summary()["status"] == "finished"
    assert run.summary()["restarts"] == 0  # of roles
