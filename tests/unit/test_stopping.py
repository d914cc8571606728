"""The stop conditions and the progress of a run."""

from __future__ import annotations

import io
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

import echelon
from echelon.config import StopConfig, replace
from echelon.roles.outcome import outcome
from echelon.roles.stopping import RETURN_WINDOW, progress, stop_reason
from echelon.runs.metrics import read_rows
from toy_envs import CounterEnv

ALL = StopConfig(steps=1_000, minutes=2.0, until_return=10.0, episodes=8)
FULL = [10.0] * RETURN_WINDOW


@pytest.mark.parametrize(
    ("env_steps", "elapsed_s", "epochs", "returns", "reason", "part"),
    [
        (0, 0.0, 0, [], "", 0.0),
        (500, 30.0, 2, FULL[1:], "", 0.5),
        (100, 90.0, 2, [0.0, *FULL[1:]], "", 0.75),
        (100, 30.0, 7, [], "", 0.875),
        (1_000, 0.0, 0, [], "steps", 1.0),
        (1_200, 0.0, 8, [], "steps", 1.0),
        (0, 0.0, 8, [], "episodes", 1.0),
        (0, 121.0, 0, [], "minutes", 1.0),
        (0, 0.0, 0, FULL, "return", 0.0),
    ],
)
def test_the_nearest_limit_counts(
    env_steps: int, elapsed_s: float, epochs: int, returns: list[float], reason: str, part: float
) -> None:
    assert stop_reason(ALL, env_steps, returns, elapsed_s, epochs) == reason
    assert progress(ALL, env_steps, elapsed_s, epochs) == pytest.approx(part)


def test_a_run_without_limits_goes_on() -> None:
    assert stop_reason(StopConfig(), 10**9, FULL, 10.0**9, 10**6) == ""
    assert progress(StopConfig(), 10**9, 10.0**9, 10**6) == 0.0


@pytest.mark.parametrize("step_s", [86_400.0, -86_400.0])
def test_steps_of_the_wall_clock_end_no_run_and_change_no_schedule(
    step_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall clock jumps by a day at every reading."""
    now, looks = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: now() + step_s * next(looks))
    small = {"actor.envs": 2, "actor.trajectory": 4, "network.hidden": (8,), "optimizer.schedule": "linear"}
    fields = {"run.dir": str(tmp_path / "run"), "engine": "inline", "stop": StopConfig(steps=80, minutes=60.0)}
    config = replace(echelon.preset("impala", "CartPole-v1"), **small, **fields)
    summary = echelon.train(config, output=io.StringIO()).summary
    assert summary["status"] == "finished" and summary["env_steps"] >= 80 and 0.0 <= summary["wall_s"] < 3_600.0
    rows = [row for row in read_rows(tmp_path / "run") if row["kind"] == "train"]
    assert all(row["progress"] <= max(row["env_steps"] / 80, 0.5) for row in rows), "by the steps"
    resumed = echelon.resume(tmp_path / "run", steps=200, minutes=60.0, output=io.StringIO()).summary
    again = [row for row in read_rows(tmp_path / "run") if row["kind"] == "train"][len(rows) :]
    # It resumes at the time of its checkpoint; the time that the first part took after that does not count.
    assert resumed["env_steps"] >= 200 and rows[0]["wall_s"] < again[-1]["wall_s"] <= resumed["wall_s"] < 3_600.0


def train_inline(folder: Path, **changes: Any) -> dict[str, Any]:
    small = {"actor.num_actors": 1, "actor.envs": 2, "actor.trajectory": 4, "network.hidden": (8,)}
    fields = {"run.dir": str(folder / f"run-{len(list(folder.iterdir()))}"), "engine": "inline", **small, **changes}
    fields["evaluation.episodes"] = 0
    return echelon.train(replace(echelon.preset("impala", "CartPole-v1"), **fields), output=io.StringIO()).summary


def test_a_linear_schedule_begins_at_the_full_rate_and_ends_above_zero(tmp_path: Path) -> None:
    linear = {"optimizer.schedule": "linear", "optimizer.learning_rate": 0.01}
    constant = linear | {"optimizer.schedule": "constant"}
    one = train_inline(tmp_path, **linear, **{"stop.steps": 1})
    assert one["updates"] == 1
    same = train_inline(tmp_path, **constant, **{"stop.steps": 1})
    assert one["weights_sha256"] == same["weights_sha256"], "the only batch is learned at the full rate"
    first, steps = one["env_steps"], one["env_steps"] + 1
    two = train_inline(tmp_path, **linear, **{"stop.steps": steps})
    assert two["updates"] == 2
    *_, last = read_rows(Path(two["run_dir"]))
    assert last["learning_rate"] == pytest.approx(0.01 * (1 - first / steps)), "as far as the run was before the batch"
    assert two["weights_sha256"] != train_inline(tmp_path, **constant, **{"stop.steps": steps})["weights_sha256"]


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("impala", {"optimizer.schedule": "linear"}, ["--until-return alone", "the learning rate stays at", "--steps"]),
        ("apex-dqn", {"optimizer.schedule": "constant"}, ["--until-return alone", "replay.beta_start=0.4"]),
        ("impala", {"optimizer.schedule": "linear", "stop.minutes": 60.0}, []),
        ("impala", {"optimizer.schedule": "constant"}, []),
    ],
)
def test_what_cannot_follow_a_run_without_a_length_is_told(
    name: str, changes: dict[str, Any], told: list[str], tmp_path: Path
) -> None:
    output = io.StringIO()
    fields = {"run.dir": str(tmp_path / "run"), "engine": "inline", "network.hidden": (8,), "stop.until_return": 0.0}
    config = replace(
        echelon.preset(name, "CartPole-v1"), **fields, **{"env.id": CounterEnv, "actor.envs": 2}, **changes
    )
    assert echelon.train(config, output=output).status == "solved"
    assert ("--until-return alone" in output.getvalue()) == bool(told)
    assert all(text in output.getvalue() for text in told), output.getvalue()


def test_a_goal_that_was_missed_is_reported(tmp_path: Path) -> None:
    output = io.StringIO()
    small = {"actor.num_actors": 1, "actor.envs": 2, "actor.trajectory": 4, "network.hidden": (8,)}
    fields = {"run.dir": str(tmp_path / "run"), "engine": "inline", "stop": StopConfig(steps=2_000, until_return=475.0)}
    config = replace(echelon.preset("impala", "CartPole-v1"), **small, **fields)
    summary = echelon.train(config, output=output).summary
    assert (summary["status"], summary["goal_reached"]) == ("finished", False)
    assert json.loads((tmp_path / "run/summary.json").read_text())["goal_reached"] is False
    *_, last = output.getvalue().splitlines()
    assert "batches of 8 steps" in output.getvalue()
    assert "goal        missed" in output.getvalue() and "--until-return 475 was missed" in last
    assert f"{summary['return_mean']:.1f}" in last
    assert last.endswith(f"echelon resume {tmp_path / 'run'} --steps 4000 --until-return 475")


def test_a_goal_that_was_reached_is_recorded(tmp_path: Path) -> None:
    summary = train_inline(tmp_path, **{"env.id": CounterEnv, "stop.until_return": 0.0})
    assert (summary["status"], summary["goal_reached"], summary.get("advice")) == ("solved", True, None)
    assert "goal_reached" not in train_inline(tmp_path, **{"stop.steps": 16}), "without a goal"


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("dqn", {"stop.steps": 64, "replay.min_size": 1_000}, ["of the 1,000 transitions", "Raise --steps"]),
        ("impala", {"stop.minutes": 1e-9}, ["first batch of 8 steps", "Raise --minutes"]),
    ],
)
def test_a_run_without_an_update_is_not_finished(
    name: str, changes: dict[str, Any], told: list[str], tmp_path: Path
) -> None:
    output = io.StringIO()
    small = {"actor.num_actors": 1, "actor.envs": 2, "actor.trajectory": 4, "network.hidden": (8,)}
    fields = {"run.dir": str(tmp_path / "run"), "engine": "inline", **small, **changes}
    result = echelon.train(replace(echelon.preset(name, "CartPole-v1"), **fields), output=output)
    assert result.status == "no_updates" and result.summary["updates"] == 0
    *_, last = output.getvalue().splitlines()
    assert "no update was made" in last and all(text in last for text in told), last


def test_a_run_that_ended_before_the_learner_could_update_is_not_short_of_transitions() -> None:
    figures = {"reason": "steps", "updates": 0, "replay": {"inserted": 1_009}}
    found = outcome(echelon.preset("dqn", "CartPole-v1"), figures, "run")
    assert found["status"] == "no_updates" and "reached its end" in found["advice"] and "1,009" not in found["advice"]
    config = replace(echelon.preset("dqn", "CartPole-v1"), **{"stop.steps": 300})
    assert "300 of the 1,000 transitions" in outcome(config, figures, "run")["advice"], "actors were faster than it"
