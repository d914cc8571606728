"""Any process may be killed at any time: the others continue, it is replaced, and nothing is left behind."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from running import Running, Runs, parent_of, processes_marked, wait_until


def stop(run: Running) -> dict[str, Any]:
    """Stops a run as a user does."""
    run.process.send_signal(signal.SIGINT)
    assert run.code() == 130, run.text()
    run.assert_nothing_left()
    return run.summary()


def test_killed_actor_is_replaced_while_training_goes_on(runs: Runs) -> None:
    run = runs.train()
    run.until_acting(0)
    for kill in range(5):  # killed from outside: replaced every time
        pid = run.kill("actor-0")
        began = time.monotonic()
        assert run.pid("actor-0", besides=pid)
        run.until_acting(0)
        print(f"measured: actor acts again after kill {kill} {time.monotonic() - began:.2f} s")
        run.until_learning()
    assert run.text().count("actor-0 (process") == 5
    assert "was ended by SIGKILL; starting it again" in run.text()
    summary = stop(run)
    assert summary["restarts"] == 5
    assert summary["dropped"] == 0


def test_training_goes_on_without_the_dead(runs: Runs) -> None:
    """A suspended actor that does not yet count as hung does not block learning."""
    run = runs.train(**{"supervision.hang_timeout_s": 600})
    run.until_acting(0)
    run.learns_while_stopped("actor-0")
    assert stop(run)["restarts"] == 0


def test_killed_learner_goes_on_from_its_newest_checkpoint(runs: Runs) -> None:
    run = runs.train(**{"run.checkpoint_interval_s": 0.2})
    run.until(lambda: list((run.run_dir / "checkpoints").glob("step_*")), "there is a checkpoint")
    run.until_learning()
    actors = [run.pid("actor-0"), run.pid("actor-1")]
    pid = run.kill("learner")
    began = time.monotonic()
    assert run.pid("learner", besides=pid)
    run.until(lambda: "the learner resumes from step_" in run.text(), "the learner is restored")
    rows = len(run.rows())
    run.until_learning()
    print(f"measured: learner learns again {time.monotonic() - began:.2f} s")
    assert [run.pid("actor-0"), run.pid("actor-1")] == actors  # they waited
    versions = [row["version"] for row in run.rows()]
    assert versions == sorted(versions)
    restored = int(run.text().split("resumes from step_")[1].split()[0])
    assert all(row["env_steps"] >= restored for row in run.rows()[rows:])
    summary = stop(run)
    assert summary["env_steps"] > restored > 0
    assert summary["updates"] < run.rows()[-1]["version"]  # the version includes those that the dead learner published
    assert summary["restarts"] == 1
    assert summary["episodes"] > 0 and summary["lag_max"] >= 0


def test_killed_learner_under_a_lag_bound(runs: Runs) -> None:
    """In lock step, data in flight is dropped or learned from in time, and no role waits forever."""
    run = runs.train("ppo", **{"run.checkpoint_interval_s": 0.2, "actor.trajectory": 16, "algorithm.epochs": 1})
    run.until(lambda: list((run.run_dir / "checkpoints").glob("step_*")), "there is a checkpoint")
    for _ in range(2):
        pid = run.kill("learner")
        run.pid("learner", besides=pid)
        run.until_learning()
        run.kill("actor-1")
        run.until_learning()
    assert stop(run)["lag_max"] == 0


def test_killed_evaluator_is_replaced(runs: Runs) -> None:
    run = runs.train(**{"evaluation.interval_s": 0.2, "evaluation.episodes": 1, "actor.num_actors": 1})
    pid = run.kill("evaluator")
    assert run.pid("evaluator", besides=pid)

    def evaluations() -> int:
        return (run.run_dir / "metrics.jsonl").read_text().count('"evaluation"')

    seen = evaluations()
    run.until(lambda: evaluations() > seen, "the new evaluator evaluates")
    stop(run)


def test_killed_fork_server_is_replaced_and_its_roles_with_it(runs: Runs) -> None:
    run = runs.train(**{"run.checkpoint_interval_s": 0.2})
    run.until(lambda: list((run.run_dir / "checkpoints").glob("step_*")), "there is a checkpoint")
    run.until_acting(0)
    names = ("learner", "actor-0", "actor-1")
    for kill in range(2):
        before = {name: run.pid(name) for name in names}
        server = run.kill("forkserver")
        began = time.monotonic()
        assert run.pid("forkserver", besides=server)
        for name, pid in before.items():
            assert run.pid(name, besides=pid)
        run.until_learning()
        print(f"measured: learns again after kill {kill} of the fork server {time.monotonic() - began:.2f} s")
    assert run.text().count("was ended by SIGKILL, and every role with it") == 2
    assert "the learner resumes from step_" in run.text()
    assert stop(run)["restarts"] == 2


def test_killed_coordinator_takes_everything_with_it(runs: Runs) -> None:
    run = runs.train(fresh=True, **{"run.checkpoint_interval_s": 0.2})
    run.until(lambda: list((run.run_dir / "checkpoints").glob("step_*")), "there is a checkpoint")
    run.until_learning()
    run.process.kill()
    began = time.monotonic()
    run.code()
    (run.run_dir / "processes.json").unlink()  # no process is left to do so
    run.assert_nothing_left()
    print(f"measured: children gone {time.monotonic() - began:.2f} s")
    done = run.rows()[-1]["env_steps"]
    again = runs.resume(done + 20_000)
    assert again.code() == 0, again.text()
    assert again.summary()["env_steps"] >= done + 20_000
    again.assert_nothing_left()


def test_what_an_environment_started_ends_with_its_actor(runs: Runs) -> None:
    run = runs.train(env="unruly:ParentalEnv", **{"actor.envs": 1, "actor.num_actors": 1})
    run.until_acting(0, num_actors=1)
    pid = run.pid("actor-0")
    children = [one for one in processes_marked(run.mark) if parent_of(one) == pid]
    assert len(children) == 1
    run.kill("actor-0")
    run.pid("actor-0", besides=pid)
    wait_until(lambda: children[0] not in processes_marked(run.mark), "the dead actor's child is gone")


@pytest.mark.full
@pytest.mark.timeout(1800)  # most of it are the growing pauses before a role that dies often starts again
def test_a_training_whose_learner_is_killed_thirty_times_solves_its_task(runs: Runs) -> None:
    """Each time it loses at most what it learned since its newest checkpoint."""
    run = runs.train(**{"run.checkpoint_interval_s": 0.5, "actor.envs": 32, "until-return": 475, "steps": 10**8})
    steps = run.run_dir / "checkpoints"
    for kill in range(30):
        before = max((path.name for path in steps.glob("step_*")), default="")
        run.until(lambda: max((p.name for p in steps.glob("step_*")), default="") > before, "a checkpoint is new")  # noqa: B023
        saved = max(path.name for path in steps.glob("step_*"))
        pid = run.kill("learner")
        assert run.pid("learner", besides=pid)
        run.until(lambda: run.text().count("the learner resumes from") == kill + 1, "it is restored")  # noqa: B023
        assert run.text().rsplit("resumes from ", 1)[1].split()[0] >= saved
    assert run.process.wait(600.0) == 0, run.text()
    assert (run.summary()["status"], run.summary()["restarts"]) == ("solved", 30)
    run.assert_nothing_left()
