"""benchmarks/zoo.py: its table, and what it refuses to record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import zoo


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["zoo.py", *words])
    zoo.main()


def test_a_task_is_trained_and_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs.jsonl"
    options = ["--engine", "inline", "--out", str(out), "--", "--steps", "300"]
    run(monkeypatch, "--only", "ppo:CartPole-v1", "--seeds", "3", *options)
    row = json.loads(out.read_text())
    assert row["seed"] == 3 and 300 <= row["env_steps"] <= 556
    assert f"| ppo | CartPole-v1 | {row['env_steps']} | 500 | {row['return']:.4g} | NO | " in capsys.readouterr().out


@pytest.mark.parametrize("words", [
    ["--only", "ppo:CartPole-v1", "--seeds", "10-14", "--", "--optimizer.learning-rate", "1"],
    ["--only", "ppo:CartPole-v1", "--seeds", "3"],
    ["--only", "ppo:echelon.envs.recall:Recall"],
])  # fmt: skip
def test_only_plain_runs_of_all_seeds_are_recorded(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = zoo.RESULTS.read_bytes()
    with pytest.raises(SystemExit):
        run(monkeypatch, "--record", *words)
    assert zoo.RESULTS.read_bytes() == before


@pytest.mark.parametrize("task", zoo.TASKS, ids=lambda task: task.name)
def test_a_run_that_ends_a_batch_late_has_no_more_steps_than_its_task(task: zoo.Task) -> None:
    assert 0.96 * task.steps < zoo.steps_of(task) < task.steps
