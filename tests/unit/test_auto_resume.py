"""--auto-resume: the same command starts a run, continues it, and leaves a finished one alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import echelon.training as training
from echelon.cli.main import main
from echelon.config_io import set_fields, to_json
from echelon.presets import preset
from echelon.runs.folder import RunFolder
from echelon.runs.metrics import read_rows

INLINE = ["--engine", "inline", "--actors", "1", "--envs-per-actor", "2", "--network.hidden", "16"]
INLINE += ["--evaluation.episodes", "0", "--learner.threads", "1", "--actor.trajectory", "5"]


@pytest.fixture
def command(tmp_path: Path, shm_dir: Path) -> list[str]:
    places = ["--shm-dir", str(shm_dir), "--run-dir", str(tmp_path / "run")]
    return ["train", "impala", "CartPole-v1", *INLINE, *places, "--auto-resume"]


def steps_of(run: Path) -> int:
    steps: int = json.loads((run / "summary.json").read_text())["env_steps"]
    return steps


def test_one_command_starts_continues_and_ends(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main([*command, "--steps", "100"]) == 0 and 100 <= (steps := steps_of(run)) < 120
    record = (run / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert main([*command, "--steps", "100"]) == 0
    assert "has reached its end" in capsys.readouterr().out
    assert (run / "metrics.jsonl").read_bytes() == record and steps_of(run) == steps
    assert main([*command, "--steps", "200"]) == 0, "a larger total goes on"
    assert "resuming from" in capsys.readouterr().out and 200 <= steps_of(run) < 220


@pytest.mark.parametrize(("schedule", "is_told"), [("linear", True), ("constant", False)])
def test_a_resume_that_raises_the_learning_rate_says_so(
    command: list[str], tmp_path: Path, schedule: str, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command, "--optimizer.schedule", schedule, "--optimizer.learning-rate", "0.004"]
    assert main([*words, "--steps", "100"]) == 0
    assert "learning rate" not in capsys.readouterr().out
    num_rows = len(read_rows(tmp_path / "run"))
    assert main([*words, "--steps", "1000"]) == 0
    first = read_rows(tmp_path / "run")[num_rows]["learning_rate"]
    assert first == pytest.approx(0.004 * (0.9 if is_told else 1.0), rel=0.03), "before the first update, too"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resuming from")]
    assert ("learning rate" in line) == is_told and ("was down to 0, continues at 0.003" in line) == is_told


def test_a_resume_without_a_length_says_once_what_the_learning_rate_is(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--optimizer.schedule", "linear", "--steps", "100"]) == 0
    capsys.readouterr()
    assert main(["resume", str(tmp_path / "run"), "--until-return", "1"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "learning rate" in line]
    assert "--until-return alone" in line and "stays at" in line


@pytest.mark.parametrize("content", [("logs/", "checkpoints/"), ("logs/", "checkpoints/", "config.json", ".lock")])
def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(
    command: list[str], tmp_path: Path, content: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in content:
        (run / name).mkdir() if name.endswith("/") else (run / name).write_text("{}")
    assert main([*command, "--steps", "100"]) == 0 and 100 <= steps_of(run) < 120
    assert {entry.name for entry in (tmp_path / "run.incomplete").iterdir()} >= {"logs", "checkpoints"}


def test_a_run_of_another_preset_or_environment_is_refused_and_other_options_are_named(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = [*command, "--acting", "auto"]
    words[words.index("--learner.threads") + 1] = "0"  # as of acting, the run stores what it has chosen
    assert main([*words, "--steps", "100"]) == 0
    config = json.loads((run / "config.json").read_text())
    for name, env in (("ppo", "CartPole-v1"), ("impala", "Acrobot-v1")):
        capsys.readouterr()
        assert main(["train", name, env, "--steps", "300", "--run-dir", str(run), "--auto-resume"]) == 2
        told = capsys.readouterr()
        assert "impala on CartPole-v1" in told.err and f"{name} on {env}" in told.err and not told.out
    assert main([*words, "--steps", "200"]) == 0
    assert "warning" not in capsys.readouterr().out, "the same command, with another limit"
    (tmp_path / "mine.toml").write_text("seed = 3\n[actor]\ntrajectory = 5\n")
    more = ["--config", str(tmp_path / "mine.toml"), "--optimizer.learning-rate", "0.5", "--learner.max-lag", "3"]
    assert main([*words, *more, "--steps", "300"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    rate = config["config"]["optimizer"]["learning_rate"]
    assert f"optimizer.learning_rate={rate}, not 0.5" in line and "seed=0, not 3" in line and "actor" not in line
    assert "learner.max_lag=none, not 3" in line


def test_values_of_the_preset_that_a_release_has_changed_are_not_told(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--steps", "100"]) == 0
    folder = RunFolder(tmp_path / "run")
    folder.write_config(to_json(set_fields(folder.parse_config(), {"optimizer.learning_rate": "0.004"})))
    assert main([*command, "--steps", "200"]) == 0 and "warning" not in capsys.readouterr().out


def test_a_run_that_is_resumed_through_its_parent_folder_keeps_its_paths(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    assert main([*command, "--steps", "100"]) == 0
    monkeypatch.chdir(other)
    assert main(["resume", "../run", "--steps", "200"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["run_dir"] == str(run) and not any("/../" in str(value) for value in summary.values())


def test_other_folders_and_runs_that_have_just_started_are_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with RunFolder(run).held():
        assert main([*command, "--steps", "100"]) == 2
    (run / "letter.txt").write_text("dear")
    assert main([*command, "--steps", "100"]) == 2
    assert main(["train", "impala", "CartPole-v1", "--steps", "1", "--auto-resume"]) == 2
    errors = capsys.readouterr().err.splitlines()
    for line, text in zip(errors, ("is still running", "is not empty", "--run-dir"), strict=True):
        assert text in line
    assert (run / "letter.txt").read_text() == "dear"


def test_a_resumed_run_takes_its_end_and_its_hosts_from_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, given = tmp_path / "run", dict[str, Any]()
    (run / "checkpoints" / "step_000000000001").mkdir(parents=True)
    RunFolder(run).write_config(to_json(preset("impala", "CartPole-v1")))
    monkeypatch.setattr(training, "resume", lambda path, **options: given.update(path=path, **options))
    words = ["train", "impala", "CartPole-v1", "--actors", "6", "--minutes", "5", "--run-dir", str(run)]
    assert main([*words, "--hosts", "3", "--hosts.address", "tcp://0.0.0.0:7000", "--auto-resume"]) == 0
    assert (given["path"], given["minutes"], given["steps"], given["hosts"]) == (run, 5.0, 0, 3)
    assert given["fields"]["hosts.address"] == "tcp://0.0.0.0:7000"
    several = {"actor.num_actors": "6", "hosts.count": "3", "engine": "hosts"}
    config = set_fields(preset("impala", "CartPole-v1"), {**several, **given["fields"]})
    assert config.hosts.lease_s == 30.0, "texts that a resumed run can read"
    assert main([*words, "--auto-resume"]) == 0 and given["hosts"] is None and not given["fields"]
