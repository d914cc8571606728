"""Any process of a run with replay may be killed: shards, priorities and counts outlive it."""

from __future__ import annotations

import json
import signal

from running import Running, Runs

FIELDS = {"actor.num_actors": 2, "actor.envs": 4, "replay.min_size": 200, "replay.batch": 32, "network.hidden": 16}
FIELDS |= {"replay.samples_per_insert": 4, "replay.capacity": 20_000, "run.checkpoint_interval_s": 0.2}
# Twice a batch and what both actors store at once (4 environments, 3 steps): those who look together pass together.
BAND = 2 * (32 + 4 * 2 * 12)


def until_learning(run: Running) -> int:
    """Waits for more updates than were reported so far; returns the steps by then."""
    seen = len(run.rows())
    before = run.rows()[-1]["replay"]["sampled"] if seen else 0
    run.until(lambda: any(row["replay"]["sampled"] > before for row in run.rows()[seen:]), "the learner learns")
    return int(run.rows()[-1]["env_steps"])


def checked(run: Running, restarts: int) -> None:
    """Ends the run as a user does, and looks at its record."""
    run.process.send_signal(signal.SIGINT)
    assert run.code() == 0, run.text()
    run.assert_nothing_left()
    rows, summary = run.rows(), run.summary()
    for name in ("env_steps", "episodes", "version"):
        values = [row[name] for row in rows]
        assert values == sorted(values), f"{name} never goes back"
    drawn = [row["replay"]["sampled"] for row in rows]
    assert drawn == sorted(drawn)
    replay = summary["replay"]
    assert summary["restarts"] == restarts
    balance = 4 * (replay["inserted"] - 200) - replay["sampled"]
    assert abs(balance) <= BAND, "the ratio is kept, whoever died"
    assert replay["inserted"] > 200 and summary["env_steps"] > 200


def test_killed_actor_goes_on_with_its_shard(runs: Runs) -> None:
    run = runs.train("apex-dqn", **FIELDS)
    until_learning(run)
    for _ in range(3):
        before = run.rows()[-1]["replay"]["inserted"]
        pid = run.kill("actor-0")
        assert run.pid("actor-0", besides=pid)
        until_learning(run)
        assert run.rows()[-1]["replay"]["inserted"] >= before
    checked(run, restarts=3)


def test_killed_learner_finds_the_replay_as_it_was(runs: Runs) -> None:
    run = runs.train("apex-dqn", **FIELDS)
    run.until(lambda: list((run.run_dir / "checkpoints").glob("step_*")), "there is a checkpoint")
    for _ in range(2):
        until_learning(run)
        before = run.rows()[-1]["replay"]["size"]
        pid = run.kill("learner")
        assert run.pid("learner", besides=pid)
        until_learning(run)
        assert run.rows()[-1]["replay"]["size"] >= before, "no transition is lost, and none has to be made again"
    assert run.text().count("the learner goes on from step_") == 2
    checked(run, restarts=2)


def test_killed_coordinator_leaves_a_run_that_goes_on_with_its_replay(runs: Runs) -> None:
    run = runs.train("apex-ddpg", env="Pendulum-v1", **FIELDS, **{"replay.checkpoint": "true"})
    run.until(lambda: list(run.run_dir.glob("replay/step_????????????")), "there is a snapshot")
    until_learning(run)
    run.process.kill()
    run.code()
    (run.run_dir / "processes.json").unlink()  # nobody is left to do so
    run.assert_nothing_left()
    done = run.rows()[-1]["env_steps"]
    newest = max(run.run_dir.glob("replay/step_????????????"))
    kept = sum(json.loads((newest / "replay.json").read_text())["limiter"]["inserted"])
    again = runs.resume(done + 2_000)
    assert again.code() == 0, again.text()
    assert kept > 0 and again.summary()["replay"]["inserted"] >= kept + 1_900, "they count on from what was kept"
    again.assert_nothing_left()
