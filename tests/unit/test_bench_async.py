"""`echelon bench async`: the bound is arithmetic, T comes from timelines, and the command reports and draws both."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from echelon.bench import async_bound
from echelon.bench.async_bound import Bound, Cost, measure_learning, measure_rollout
from echelon.bench.async_runs import Iterations, num_iterations, window, work_of
from echelon.bench.async_setting import AsyncSetting
from echelon.bench.async_training import table
from echelon.bench.plot import draw_report
from echelon.cli.main import main
from echelon.config import replace
from echelon.errors import ConfigError
from echelon.presets import preset
from echelon.training import train

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured alone is measured briefly."""
    monkeypatch.setattr(async_bound, "NUM_CHUNKS", 1)
    monkeypatch.setattr(async_bound, "CHUNK_S", 0.02)


# The bound.


def test_synchronous_training_takes_a_rollout_and_an_iteration_after_each_other() -> None:
    assert Bound(Cost(5.0, 5.5), Cost(1.0, 1.25), num_cores=2).sync_s == 6.75


@pytest.mark.parametrize(
    ("rollout", "learn", "num_actors", "num_cores", "limit", "expected"),
    [
        (Cost(6.0, 6.0), Cost(2.0, 2.0), 2, 2, "cores", 4.0),  # (6 + 2) / 2; one iteration needs 8 s of two cores
        (Cost(6.0, 6.0), Cost(2.0, 2.0), 2, 16, "rollouts", 3.0),  # two actors deliver a trajectory every 3 s
        (Cost(6.0, 6.0), Cost(2.0, 2.0), 4, 16, "learning", 2.0),  # every 1.5 s: the learner takes 2 s for it
        (Cost(6.0, 6.0), Cost(2.0, 2.0), 4, 2, "cores", 4.0),  # more actors do not help two cores
        (Cost(1.0, 1.0), Cost(3.0, 3.0), 2, 2, "learning", 3.0),
        (Cost(0.5, 6.0), Cost(2.0, 2.0), 2, 2, "rollouts", 3.0),  # the environment waits: its wall time counts
        (Cost(6.0, 6.0), Cost(0.5, 5.0), 2, 4, "learning", 5.0),  # the learner waits for its GPU
        (Cost(8.0, 8.0), Cost(1.0, 1.0), 8, 4, "cores", 2.25),
    ],
)
def test_asynchronous_training_is_bound_by_the_slowest_part(
    rollout: Cost, learn: Cost, num_actors: int, num_cores: int, limit: str, expected: float
) -> None:
    bound = Bound(rollout, learn, num_cores)
    assert bound.async_s(num_actors) == pytest.approx(expected) and bound.limit(num_actors) == limit


def test_both_costs_are_those_of_a_whole_trajectory(shm_dir: Path) -> None:
    changes: dict[str, Any] = {"actor.num_actors": 2, "actor.envs": 2, "learner.batch": 1, "learner.max_lag": None}
    changes |= {"algorithm.epochs": 1, "algorithm.minibatches": 2, "shm_dir": str(shm_dir)}
    config = replace(preset("ppo", "CartPole-v1"), **changes)
    short, long = (replace(config, **{"actor.trajectory": steps}) for steps in (8, 512))
    rollouts = [measure_rollout(each).cpu_s for each in (short, long)]
    assert rollouts[1] > 8 * rollouts[0] > 0, "64 times the steps"
    iterations = [measure_learning(each) for each in (short, long)]
    assert iterations[1].cost.cpu_s > iterations[0].cost.cpu_s > 0
    assert iterations[0].device == "cpu" and iterations[0].threads == 1
    assert not list(shm_dir.iterdir())


def test_a_rollout_is_measured_with_the_policy_of_the_run(tmp_path: Path) -> None:
    changes = {"actor.num_actors": 1, "actor.envs": 2, "actor.trajectory": 8, "run.dir": str(tmp_path / "run")}
    config = replace(preset("ppo", "CartPole-v1"), **changes)
    train(replace(config, **{"engine": "inline", "stop.steps": 16}), output=io.StringIO())
    assert measure_rollout(config, tmp_path / "run").cpu_s > 0
    with pytest.raises(ConfigError, match="weights do not fit"):
        measure_rollout(replace(config, **{"network.hidden": (8,)}), tmp_path / "run")


# T, from timelines.


def spans(*starts: float, length: float) -> list[tuple[float, float]]:
    return [(start, start + length) for start in starts]


def test_t_is_the_mean_time_between_iterations_after_the_warm_up() -> None:
    timelines = {
        "actor-0": spans(0.0, 10.0, 20.0, 30.0, 40.0, length=7.0),
        "learner": spans(7.0, 27.0, 37.0, 47.0, 57.0, length=3.0),
    }
    found = Iterations.of(timelines, num_actors=1)
    assert (found.start_s, found.end_s, found.count, found.interval_s) == (37.0, 57.0, 2, 10.0)
    assert found.learner_busy == pytest.approx(0.3) and found.actors_busy == pytest.approx(0.35)  # 40 to 47, of 20 s


def test_t_is_measured_over_whole_turns_of_the_actors() -> None:
    starts = [0.0, 1.0, 10.0, 11.0, 20.0, 21.0, 30.0, 31.0, 40.0]  # each actor delivers every 10 s, 1 s apart
    found = Iterations.of({"actor-0": [(0.0, 9.0)], "learner": spans(*starts, length=0.5)}, num_actors=2)
    assert (found.start_s, found.end_s, found.count) == (11.0, 31.0, 4) and found.interval_s == 5.0


def test_who_waits_tells_what_bounds_a_run() -> None:
    learner = spans(*range(0, 80, 10), length=9.0)
    waiting = {"actor-0": spans(*range(0, 80, 20), length=5.0), "actor-1": spans(*range(10, 80, 20), length=5.0)}
    assert Iterations.of({**waiting, "learner": learner}, 2).is_learning_bound
    rolling = {name: spans(*range(0, 80, 20), length=19.9) for name in waiting}
    assert not Iterations.of({**rolling, "learner": learner}, 2).is_learning_bound


def test_too_few_iterations_are_refused() -> None:
    with pytest.raises(ConfigError, match="the learner began 4 iterations, which is too few: the first 3 are left out"):
        Iterations.of({"learner": spans(1.0, 2.0, 3.0, 4.0, length=0.5)}, num_actors=2)
    with pytest.raises(ConfigError, match="the learner began 0 iterations"):
        Iterations.of({}, num_actors=1)


@pytest.mark.parametrize("num_actors", [1, 2, 3, 5])
def test_a_run_is_long_enough_to_be_measured(num_actors: int) -> None:
    for seconds, least in ((0.01, 4), (35.0, 7)):
        count = num_iterations(num_actors, seconds, interval_s=5.0)
        timelines = {"learner": spans(*map(float, range(count)), length=0.5)}
        found = Iterations.of(timelines, num_actors)
        assert least <= found.count < least + num_actors


def test_work_is_that_of_whole_rollouts_and_iterations() -> None:
    """Actors that have done 5 rollouts and a part of two more, and a learner that has learned from 4 of the 5."""
    work = {"actor-0": [9.0, 12.0, 15.0], "actor-1": [8.0, 11.0], "learner": [2.0, 2.5, 3.0, 3.5], "evaluator": [7.0]}
    assert work_of(work) == 3.0 + 0.5


def test_a_window_cuts_what_it_shows() -> None:
    assert window([(0.0, 2.0), (3.0, 4.0), (5.0, 9.0), (9.0, 9.5)], 1.0, 6.0) == [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0)]


# The command.


def test_the_defaults_are_those_of_the_study() -> None:
    assert AsyncSetting().rows == {32: ("sync", "async"), 48: ("sync", "async"), 96: ("sync", "async"), 192: ("sync",)}
    assert AsyncSetting(envs=(4, 8), sync_envs=0).rows == {4: ("sync", "async"), 8: ("sync", "async")}
    assert AsyncSetting(envs=(4,), num_actors=3).rows == {4: ("sync", "async"), 12: ("sync",)}


TINY = ["--actor.trajectory", "32", "--algorithm.epochs", "2", "--minibatch", "32", "--seconds", "0.05"]


def test_the_command_measures_reports_and_draws(
    tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    options = ["--envs-per-actor", "4", "--sync-envs", "0", "--shm-dir", str(shm_dir), "--output", str(path)]
    assert main(["bench", "async", "CartPole-v1", *TINY, *options]) == 0
    shown = capsys.readouterr()
    report = json.loads(path.read_text())
    assert table(report) in shown.out and "sync (T, EPS)" in shown.out
    (row,) = report["rows"]
    assert row["envs"] == 4 and row["minibatches"] == 4, "4 environments x 32 steps in minibatches of 32"
    for kind in ("sync", "async"):
        found = row[kind]
        assert found["eps"] == pytest.approx(4 / found["interval_s"]["median"])
        assert found["share_of_bound"] == pytest.approx(found["bound_s"] / found["interval_s"]["median"])
        assert all(run["iterations"] >= 4 and 0 < run["learner_busy"] <= 1 for run in found["runs"])
        assert all(run["work_s"] > 0 for run in found["runs"])
    assert row["ratio"] == pytest.approx(row["sync"]["interval_s"]["median"] / row["async"]["interval_s"]["median"])
    assert row["sync"]["runs"][0]["lag_mean"] == 0 < row["async"]["runs"][0]["lag_mean"]
    assert row["sync"]["bound_s"] == pytest.approx(row["sync"]["rollout"]["wall_s"] + row["learn"]["wall_s"])
    titles = [panel["title"] for panel in report["timelines"]]
    assert titles[0].startswith("sync: 1 × 4 environments") and titles[1].startswith("async, ")
    assert list(report["timelines"][1]["roles"]) == ["actor-0", "actor-1", "learner"]
    for name in ("report-eps.png", "report-timelines.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG) and name in shown.err
    assert "of the bound" in (tmp_path / "report.html").read_text()
    assert not list(shm_dir.iterdir())
    _check_that_damage_is_told(path, report)
    for others, is_told in ((0.05, False), (0.5, True)):
        row["sync"]["runs"][0]["used"], row["async"]["runs"][0]["used"] = None, {"others_cores": others}
        assert f"?, {others:.2f}" in table(report)
        assert ("warning: other programs took cores from K=4" in table(report)) == is_told


@pytest.mark.parametrize("place", ["echelon.runs.report.drawn_curve", "echelon.bench.async_training.measure_rollout"])
def test_a_signal_ends_the_command_even_when_a_training_is_almost_over_or_none_runs(
    place: str, shm_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signals = []

    def signalled(*arguments: object) -> None:
        signals.append(arguments)
        signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)  # type: ignore[misc, operator]

    monkeypatch.setattr(place, signalled)
    options = ["--envs-per-actor", "4", "--sync-envs", "0", "--shm-dir", str(shm_dir)]
    assert main(["bench", "async", "CartPole-v1", *TINY, *options]) == 130
    assert len(signals) == 1 and "interrupted" in capsys.readouterr().err and not list(shm_dir.iterdir())


def _check_that_damage_is_told(path: Path, report: dict[str, Any]) -> None:
    for broken in ({**report, "rows": []}, {**report, "timelines": [{}]}, {**report, "config": {}}):
        path.write_text(json.dumps(broken))
        with pytest.raises(ConfigError, match=r"is damaged: .* Measure again with `echelon bench async ENV"):
            draw_report(path)


def test_the_help_lists_the_values_that_apply(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "async", "--help"])
    shown = capsys.readouterr().out
    assert main(["bench", "async", "CartPole-v1", "--dry-run"]) == 0
    assert "trajectory = 512 " in capsys.readouterr().out
    for text in ("actor.trajectory int  (default 512)", "actor.slots int  (default 2)", "(default 32,32,32)"):
        assert f" {text}" in shown.replace("--", " ")


WRONG = [
    ("", "the environment is missing: `echelon bench async ENV`"),
    ("CartPole-v1 --envs-per-actor 4,4", "envs_per_actor=4,4 must be different numbers of at least 1"),
    ("CartPole-v1 --envs-per-actor four", "--envs-per-actor: 'four' is not a list of whole numbers: write 32,48,96"),
    ("CartPole-v1 --steps 1000", "the benchmark sets the stop conditions itself"),
    ("CartPole-v1 --actors 1", "num_actors=1 must be at least 2"),
    ("CartPole-v1 --seconds 0", "seconds=0 must be above 0"),
    ("CartPole-v1 --stop.steps 100", "the benchmark sets the stop conditions itself"),
    ("CartPole-v1 --engine inline", "engine=inline: asynchronous training needs a process for each role"),
    ("CartPole-v1 --run.dir somewhere", "run.dir=somewhere: the benchmark makes several runs"),
    ("CartPole-v1 --preset impala", "--preset impala does not fit the preset ppo. Remove --preset."),
    ("CartPole-v1 --output /nowhere/report.json", "--output /nowhere/report.json cannot be written"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_options_are_told(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "async", *words.split()]) == 2
    assert message in capsys.readouterr().err
