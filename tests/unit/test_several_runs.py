"""Several runs: the list of them, many seeds of one training, and their comparison."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from echelon.cli.main import main
from echelon.cli.seeds import progress_line
from echelon.config import TrainConfig, replace
from echelon.config_io import to_json
from echelon.control_groups import num_cores
from echelon.names import short_name
from echelon.presets import preset
from echelon.runs.comparison import common_grid
from echelon.runs.folder import RunFolder
from echelon.runs.records import RunRecord
from running import Running


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_run(
    path: Path,
    returns: list[float],
    *,
    name: str = "ppo",
    status: str = "finished",
    goal_reached: bool | None = None,
    **fields: Any,
) -> Path:
    """Writes the folder of a run as a training does: a row every 100 steps."""
    config: TrainConfig = replace(preset(name, "CartPole-v1"), **{"stop.steps": 100 * len(returns), **fields})
    folder = RunFolder.create(path)
    folder.write_config(to_json(config))
    rows = [
        {
            "kind": "train",
            "env_steps": 100 * index,
            "return_mean": value,
            "wall_s": 2.0 * index,
            "env_steps_per_s": 50.0,
        }
        for index, value in enumerate(returns, 1)
    ]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if status:
        last = {"env_steps": 0, "return_mean": None, "wall_s": 0.0, **(rows[-1] if rows else {})}
        last |= {} if goal_reached is None else {"goal_reached": goal_reached}
        folder.write_summary({**last, "status": status, "evaluation_return": 2.0 * (returns or [0.0])[-1]})
    return path


def changed_at(path: Path, age_s: float) -> None:
    for file in path.iterdir():
        os.utime(file, (time.time() - age_s,) * 2)


# --------------------------------------------------------------------------------------------------------------- list


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["list", "--json", *arguments]) == 0
    records: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return records


def test_list_shows_the_runs_newest_first(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed_at(write_run(here / "runs/old", [1.0, 2.5], name="impala", status="stopped", seed=3), 7300.0)
    changed_at(write_run(here / "runs/group/seed-10", [5.0]), 300.0)
    changed_at(write_run(here / "runs/group/seed-9", [4.0, 5.0, 1234.5]), 100.0)
    assert main(["list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "run            preset  env          seed  status    steps   return  time    age",
        "group/seed-9   ppo     CartPole-v1     0  finished    300  1,234.5   6 s  1 min",
        "group/seed-10  ppo     CartPole-v1     0  finished    100      5.0   2 s  5 min",
        "old            impala  CartPole-v1     3  stopped     200      2.5   4 s    2 h",
    ]
    assert [record["run"] for record in listed(capsys, "runs/group")] == ["runs/group/seed-9", "runs/group/seed-10"]
    assert [record["evaluation_return"] for record in listed(capsys, "runs/old")] == [5.0]


def test_list_shows_a_missed_goal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(here / "runs/missed", [1.0], goal_reached=False)
    write_run(here / "runs/reached", [1.0], status="solved", goal_reached=True)
    write_run(here / "runs/stopped", [1.0], status="stopped", goal_reached=False)
    write_run(here / "runs/without", [1.0])
    found = {Path(record["run"]).name: record["goal_reached"] for record in listed(capsys)}
    assert found == {"missed": False, "reached": True, "stopped": False, "without": None}
    assert main(["list"]) == 0
    told = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "goal missed" in line]
    assert told == ["missed"]


def test_list_tells_running_from_crashed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crashed = write_run(here / "runs/crashed", [1.0, 2.0], status="")
    (crashed / ".lock").write_text("4194304")
    write_run(here / "runs/failed", [1.0], status="failed")
    with RunFolder(write_run(here / "runs/running", [1.0, 2.0, 3.0], status="")).held():
        records = listed(capsys)
    statuses = {Path(record["run"]).name: (record["status"], record["env_steps"]) for record in records}
    assert statuses == {"running": ("running", 300), "crashed": ("crashed", 200), "failed": ("failed", 100)}
    assert records[0]["status"] == "running"
    assert {record["status"] for record in listed(capsys)} == {"crashed", "failed"}


def test_foreign_and_damaged_folders_do_not_break_the_list(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(here / "runs/good", [7.0])
    bad = {name: write_run(here / "runs" / name, [1.0]) for name in ("no-json", "no-summary", "odd", "links")}
    (bad["no-json"] / "config.json").write_text("{")
    (bad["no-summary"] / "summary.json").write_text("[1]")
    (bad["odd"] / "config.json").write_text('{"format": 1, "config": {"env": 3, "seed": "x\\u001b[2J", "preset": []}}')
    (bad["odd"] / "summary.json").write_text('{"status": "a\\u001b[2J", "env_steps": "many", "return_mean": []}')
    (bad["links"] / "metrics.jsonl").unlink()
    os.mkfifo(bad["links"] / "metrics.jsonl")
    (bad["links"] / "summary.json").unlink()
    (bad["links"] / ".lock").symlink_to("/dev/zero")
    (here / "runs/file").write_text("no folder")
    (here / "runs/empty").mkdir()
    (here / "runs/photos/2026").mkdir(parents=True)
    statuses = {Path(record["run"]).name: record["status"] for record in listed(capsys)}
    expected = {"good": "finished", "no-json": "damaged", "no-summary": "crashed", "links": "crashed"}
    assert statuses == {**expected, "odd": "a\x1b[2J"}
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and len(out.splitlines()) == 6


def test_list_without_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0 and "no runs in runs" in capsys.readouterr().out
    assert listed(capsys) == []
    assert main(["list", "nowhere"]) == 2 and "nowhere cannot be listed" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- seeds

TINY = [
    *("--engine", "inline", "--actors", "1", "--envs-per-actor", "2", "--actor.trajectory", "8"),
    *("--network.hidden", "8", "--evaluation.interval-s", "0", "--algorithm.minibatches", "2"),
    *("--algorithm.epochs", "1", "--steps", "200"),
]
PROMETHEUS = "echelon.callbacks:Prometheus"
FAILS_WITH_SEED_1 = """
import sys, gymnasium
def make():
    if any(word.endswith("seed-1") for word in sys.argv):
        raise RuntimeError("boom")
    return gymnasium.make("CartPole-v1")
"""
STOPS_WITH_SEED_1 = """
import os, signal, sys, time, gymnasium
class Stops(gymnasium.Wrapper):
    steps = 0
    def step(self, action):
        Stops.steps += 1
        if Stops.steps == 100 and any(word.endswith("seed-1") for word in sys.argv):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        return self.env.step(action)
def make():
    return Stops(gymnasium.make("CartPole-v1"))
"""
Train = Callable[..., int]


@pytest.fixture
def train(here: Path, shm_dir: Path) -> Train:
    return lambda env, *words: main(["train", "ppo", env, *TINY, "--shm-dir", str(shm_dir), *words])


def test_seeds_are_trained_each_in_its_folder_and_summarised(
    here: Path, train: Train, shm_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train("CartPole-v1", "--seeds", "0-1,5", "--jobs", "2") == 0
    (group,) = (here / "runs").iterdir()
    assert group.name.startswith("ppo-CartPole-v1-seeds0-1,5-20")
    summary = json.loads((group / "summary.json").read_text())
    assert [(run["seed"], run["status"]) for run in summary["runs"]] == [(s, "finished") for s in (0, 1, 5)]
    own = {seed: json.loads((group / f"seed-{seed}/summary.json").read_text()) for seed in (0, 1, 5)}
    assert {seed: one["seed"] for seed, one in own.items()} == {0: 0, 1: 1, 5: 5}
    assert len({one["weights_sha256"] for one in own.values()}) == 3
    assert summary["median"]["return_mean"] == sorted(one["return_mean"] for one in own.values())[1]
    low, high = summary["interquartile_range"]["return_mean"]
    assert low <= summary["median"]["return_mean"] <= high
    out = capfd.readouterr().out
    assert "(3 of 3)" in out and "median  of 3" in out and str(group) in out
    assert list(shm_dir.iterdir()) == []


def test_a_seed_that_fails_does_not_stop_the_others(
    here: Path, train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "broken.py").write_text(FAILS_WITH_SEED_1)
    assert train("broken.py:make", "--seeds=0-2", "--run-dir=group") == 1
    summary = json.loads((here / "group/summary.json").read_text())
    assert [run["status"] for run in summary["runs"]] == ["finished", "failed", "finished"]
    assert "boom" in summary["runs"][1]["error"] and summary["num_ended"] == 2
    out, err = capfd.readouterr()
    assert "boom" in err and "seed-1.log" in err and "median  of 2" in out
    assert train("CartPole-v1", "--run-dir=group", "--auto-resume") == 2, "not of one training"
    assert "--seeds and --auto-resume" in capfd.readouterr().err
    assert train("CartPole-v1", "--seeds=0-2", "--run-dir=group") == 2, "the folder is taken"
    assert train("CartPole-v1", "--seeds=0-2", "--run-dir=group/seed-0") == 2
    capfd.readouterr()


def test_a_goal_that_a_seed_missed_is_shown(here: Path, train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    assert train("CartPole-v1", "--seeds=0-1", "--until-return=400", "--run-dir=group") == 0
    summary = json.loads((here / "group/summary.json").read_text())
    assert [(run["status"], run["goal_reached"]) for run in summary["runs"]] == [("finished", False)] * 2
    out = capfd.readouterr().out
    assert out.count("finished (goal missed)") == 4, "a line when it ends and a row of the table for each"


def test_the_line_of_a_group_fits_the_terminal() -> None:
    def running(progress: float | None) -> RunRecord:
        return RunRecord(Path("run"), "running", env_steps=20_072.0, return_mean=123.456, progress=progress)

    two: dict[int, RunRecord | None] = {0: running(0.5), 1: running(1.0)}
    whole = "3 s | seed 0 50%, 20,072 steps, return 123.5 | seed 1 100%, 20,072 steps, return 123.5"
    assert progress_line("3 s", two) == progress_line("3 s", two, len(whole)) == whole
    assert progress_line("3 s", two, 80) == "3 s | seed 0 50%, return 123.5 | seed 1 100%, return 123.5"
    assert progress_line("3 s", two, 40) == "3 s | seed 0 50% | seed 1 100%"
    assert progress_line("3 s", {**two, 2: None, 3: None}, 40) == "3 s | seed 0 50% | seed 1 100% | 2 more"
    assert progress_line("3 s", {0: running(None)}, 30) == "3 s | seed 0 20,072 steps"


def test_a_seed_that_is_stopped_alone_gives_its_exit_code(
    here: Path, train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "stops.py").write_text(STOPS_WITH_SEED_1)
    assert train("stops.py:make", "--seeds=0-2", "--run-dir=group") == 128 + signal.SIGTERM
    summary = json.loads((here / "group/summary.json").read_text())
    assert [run["status"] for run in summary["runs"]] == ["finished", "stopped", "finished"]
    assert "--auto-resume" in capfd.readouterr().out


def test_a_dry_run_with_seeds_starts_nothing(here: Path, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("CartPole-v1", "--seeds", "0-1", "--dry-run") == 0
    assert 'preset = "ppo"' in capsys.readouterr().out and not list(here.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0-4", "--seed", "1"], "--seed 1 and --seeds 0-4: give one of them"),
        (["--seeds", "4-0"], "must go upwards"),
        (["--seeds", "a"], "not a list of seeds"),
        (["--seeds", "0,0-2"], "names a seed twice"),
        (["--seeds", "-1"], "not a list of seeds"),
        (["--seeds"], "--seeds needs a value"),
        (["--seeds", "0-1", "--jobs", "0"], "--jobs 0 must be a whole number"),
        (["--jobs", "2"], "--jobs 2 has no effect"),
        (["--seeds", "0-1", "--steps", "0"], "the run would never end"),
        (["--seeds", "0-1", "--engine", "hosts", "--hosts", "2", "--actors", "2"], "--seeds trains on this host only"),
        (["--seeds", "0-1", "--jobs", "2", "--acting.address", "tcp://127.0.0.1:7000"], "cannot share port 7000"),
        (["--seeds", "0-1", "--jobs", "2", "--callback", f"{PROMETHEUS}(port=9100)"], "cannot share port 9100"),
        (["--seeds", "0-1", "--callback", f"{PROMETHEUS}(prt=0)"], "prt"),
        (["--seeds", "0-1", "--actor.envz", "3"], "actor.envz"),
    ],
)
def test_mistakes_with_seeds_are_told_before_anything_starts(
    words: list[str], message: str, here: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("CartPole-v1", *words) == 2
    assert message in capsys.readouterr().err and not list(here.iterdir())


def test_cores_are_divided_among_the_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ECHELON_CORES", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr("echelon.control_groups.groups", lambda controller: iter(()))
    assert num_cores() == 16
    for text, cores in (("4", 4), ("64", 16), ("0", 16), ("many", 16)):
        monkeypatch.setenv("ECHELON_CORES", text)
        assert num_cores() == cores


def test_ctrl_c_stops_all_trainings_gracefully(here: Path, shm_dir: Path) -> None:
    options = {"seeds": "0-2", "jobs": 2, "engine": "inline", "steps": 10**9, "actor.envs": 2, "actors": 1}
    options |= {"env.wrappers": "unruly:Unhurried"}
    run = Running.train("impala", "CartPole-v1", here / "group", shm_dir, **options)
    try:
        metrics = [here / f"group/seed-{seed}/metrics.jsonl" for seed in (0, 1)]
        run.until(lambda: all(file.exists() and file.stat().st_size for file in metrics), "both train")
        assert not (here / "group/seed-2").exists()
        summary = run.stop()
    finally:
        run.close()
    assert [one["status"] for one in summary["runs"]] == ["stopped", "stopped", "not started"]
    assert all(list((here / f"group/seed-{seed}/checkpoints").iterdir()) for seed in (0, 1))


# ------------------------------------------------------------------------------------------------------------ compare


def test_compare_shows_results_and_only_the_values_that_differ(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, last in enumerate((10.0, 20.0, 60.0, 30.0, 40.0)):
        write_run(here / f"wide/seed-{seed}", [1.0, last], seed=seed, **{"network.hidden": (64,)})
    narrow = {"network.hidden": (8,), "stop.steps": 200, "learner.max_lag": None}
    write_run(here / "narrow", [1.0, 2.0, 5.0], seed=8, **narrow)
    assert main(["compare", "wide", "narrow"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "status", "return", "evaluation", "steps", "steps/s", "time"]
    assert "wide (5 seeds)" in lines[1] and "30.0 (20.0 to 40.0)" in lines[1] and "60.0 (40.0 to 80.0)" in lines[1]
    assert lines[2].split() == ["narrow", "finished", "5.0", "10.0", "300", "50", "6", "s"]
    fields = [line.split() for line in lines[lines.index("") + 4 : -2]]
    assert fields == [["field", "[1]", "[2]"], ["learner.max_lag", "0", "none"], ["network.hidden", "64", "8"]]
    assert (here / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_seeds_given_one_by_one_are_one_entry_and_repetitions_are_not(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("a", 0), ("b", 1), ("again/b", 1)):
        write_run(here / name, [1.0, 2.0], seed=seed)
    assert main(["compare", "a", "b", "-o", "two.svg"]) == 0
    assert "a (2 seeds)" in capsys.readouterr().out and "<svg" in (here / "two.svg").read_text()
    assert main(["compare", "a", "b", "again/b"]) == 0
    out = capsys.readouterr().out
    assert "seeds)" not in out and "again/b" in out and "the configurations are equal" in out


def test_runs_of_different_lengths_share_the_steps_that_all_have() -> None:
    short, long = ([100.0, 200.0], [0.0, 1.0]), ([50.0, 400.0], [0.0, 7.0])
    grid = common_grid([short, long])
    assert grid is not None and (grid[0], grid[-1]) == (100.0, 200.0)
    assert common_grid([short, ([300.0, 400.0], [0.0, 1.0])]) is None


def test_titles_name_a_file_without_its_folder() -> None:
    assert short_name("/home/me/work/maze.py:Maze(size=3)") == "maze.py:Maze"
    assert short_name("ALE/Pong-v5") == "ALE/Pong-v5" and short_name("package.envs:make") == "package.envs:make"


def test_a_group_in_place_of_a_run_is_told_with_its_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        write_run(here / f"group/seed-{seed}", [1.0], seed=seed)
    for words in (["eval"], ["resume"], ["export", "--format", "safetensors"]):
        assert main([words[0], "group", *words[1:]]) == 2
        assert "2 in it: seed-0, seed-1" in capsys.readouterr().err
    assert main(["train", "ppo", "CartPole-v1", "--steps", "10", "--seeds", "0-1", "--run-dir", "group"]) == 2
    assert "Continue those runs with --seeds and --auto-resume" in capsys.readouterr().err
    assert main(["eval", "group/seed-0/config.json"]) == 2
    assert "is a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no run folder nowhere"),
        (["empty"], "neither a run folder nor a folder of runs"),
        (["run", "-o", "x.bmp"], "must end with"),
        (["run", "-o", "no/x.png"], "cannot be written"),
        (["broken"], "config.json is damaged"),
    ],
)
def test_mistakes_with_compare_are_told(
    words: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "empty").mkdir()
    write_run(here / "run", [1.0])
    (write_run(here / "broken", [1.0]) / "config.json").write_text("{")
    assert main(["compare", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn."""
    figures: list[Any] = []
    save = Figure.savefig

    def savefig(figure: Figure, *arguments: Any, **fields: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **fields)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def test_compare_draws_each_environment_in_its_own_panel(here: Path, drawn: list[Any]) -> None:
    for name, env, last in (("a", "CartPole-v1", 500.0), ("b", "CartPole-v1", 400.0), ("c", "FrozenLake-v1", 0.9)):
        write_run(here / name, [0.0, last], **{"env.id": env, "actor.total_envs": 8 + ord(name)})
    assert main(["compare", "a", "b", "c"]) == 0
    panels = drawn[0].axes
    assert [axes.get_title(loc="left") for axes in panels] == ["CartPole-v1", "FrozenLake-v1"]
    assert [[line.get_label() for line in axes.lines] for axes in panels] == [["a", "b"], ["c"]]
    assert panels[1].get_ylim()[1] < 2.0 and len({line.get_color() for axes in panels for line in axes.lines}) == 3


def test_compare_draws_a_marker_for_a_run_that_is_too_short_for_a_line(here: Path, drawn: list[Any]) -> None:
    write_run(here / "long", [float(index) for index in range(300)], **{"network.hidden": (8,)})
    write_run(here / "one", [5.0], **{"network.hidden": (9,)})
    for seed in (0, 1):
        write_run(here / f"group/seed-{seed}", [2.0], seed=seed)
    assert main(["compare", "long", "one", "group"]) == 0
    markers = {line.get_label(): line.get_marker() for line in drawn[0].axes[0].lines}
    assert markers["long"] == "None" and markers["one"] == markers["group (2 seeds)"] == "o"


def test_compare_draws_runs_without_an_episode(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(here / "a/seed-0", [])
    write_run(here / "a/seed-1", [3.0], seed=1)
    assert main(["compare", "a", "a/seed-0"]) == 0
    assert (here / "compare.png").is_file()
