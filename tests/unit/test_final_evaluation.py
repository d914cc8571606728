"""The evaluation at the end of a run, and the best weights that a run keeps."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import echelon
from echelon.cli.main import main
from echelon.config import replace
from echelon.errors import ConfigError, EnvError
from echelon.roles.evaluator import Evaluator, Match
from echelon.roles.gauge import Gauge
from echelon.runs.best import Best, read_best, save_best
from echelon.runs.checkpoint import load_weights
from echelon.runs.metrics import read_rows
from echelon.runs.report import number_text
from echelon.runs.weights import read_weights, weights_path
from stage import Stage

TINY = {"actor.num_actors": 1, "actor.envs": 2, "actor.trajectory": 8, "network.hidden": (8,), "learner.threads": 1}
TINY |= {"engine": "inline", "stop.steps": 100, "algorithm.minibatches": 2, "algorithm.epochs": 1}
TINY |= {"evaluation.episodes": 3, "evaluation.interval_s": 0.0}


def train(folder: Path, **changes: Any) -> tuple[dict[str, Any], str]:
    """The summary and the output of a short training."""
    output = io.StringIO()
    config = replace(echelon.preset("ppo", "CartPole-v1"), **{**TINY, "run.dir": str(folder), **changes})
    return echelon.train(config, output=output).summary, output.getvalue()


@pytest.mark.parametrize("interval_s", [0.0, 60.0])
def test_the_final_weights_are_evaluated(tmp_path: Path, interval_s: float) -> None:
    summary, text = train(tmp_path / "run", **{"evaluation.interval_s": interval_s})
    mean, steps = summary["evaluation_return_mean"], summary["env_steps"]
    assert summary["evaluation_episodes"] == 3 and summary["evaluation_return"] == mean >= 1.0
    assert json.loads((tmp_path / "run/summary.json").read_text())["evaluation_return_mean"] == mean
    rows = read_rows(tmp_path / "run")
    (row,) = (row for row in rows if row["kind"] == "evaluation")
    assert (row["return_mean"], row["env_steps"], row["episodes"]) == (mean, steps, 3)
    assert row["version"] == rows[-2]["version"] > 0, "that of the last row of training"
    lines = text.splitlines()
    spread = summary["evaluation_return_std"]
    assert spread == row["return_std"]
    shown = f"{number_text(mean)} ± {number_text(spread)}, mean of 3 episodes"
    assert f"evaluation  {shown} with the final weights" in lines, text
    assert f"best        {number_text(mean)} at {steps:,} steps (--checkpoint best)" in lines
    without, _ = train(tmp_path / "other", **{"evaluation.episodes": 0})
    assert summary["weights_sha256"] == without["weights_sha256"], "evaluation does not change training"
    assert without["evaluation_return_mean"] is None and not (tmp_path / "other/checkpoints/best").exists()


def test_the_final_weights_are_evaluated_in_processes(tmp_path: Path, shm_dir: Path) -> None:
    """As with the inline engine, although the evaluator starts only at the end."""
    inline, _ = train(tmp_path / "inline")
    local, _ = train(tmp_path / "local", **{"engine": "local", "shm_dir": str(shm_dir)})
    assert local["weights_sha256"] == inline["weights_sha256"]
    assert local["evaluation_return_mean"] == inline["evaluation_return_mean"]
    assert local["restarts"] == 0 and not list(shm_dir.iterdir())


def test_a_request_that_comes_while_the_evaluator_starts_is_served(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(**{"evaluation.episodes": 1})
    begin = Gauge.begin

    def ask(gauge: Gauge, incarnation: int) -> None:
        """The role has joined; it does not serve its own functions yet."""
        stage.world.post("evaluator", "evaluate", "checkpoint", 0, 1, 10.0)
        begin(gauge, incarnation)

    monkeypatch.setattr(Gauge, "begin", ask)
    evaluator = Evaluator(dataclasses.replace(stage.context, name="evaluator"))
    stage.roles.append(evaluator)
    evaluator.step(0.1)
    assert evaluator.final is not None


def test_episodes_that_never_end_do_not_hold_up_the_end(tmp_path: Path) -> None:
    endless = {"env.id": "toy_envs:CounterEnv", "env.kwargs": {"length": 1 << 40}, "evaluation.limit_s": 0.3}
    summary, text = train(tmp_path / "run", **endless)
    assert summary["status"] == "finished" and summary["evaluation_episodes"] == 0
    assert summary["evaluation_return_mean"] is None and "0 of 3 episodes of the final evaluation ended" in text
    (line,) = (line for line in text.splitlines() if line.startswith("evaluation "))
    assert "no episode ended" in line and "TimeLimit" in line and "--evaluation.limit-s" in line
    assert not (tmp_path / "run/checkpoints/best").exists()


def test_the_result_of_a_run_is_shown_without_its_summary(tmp_path: Path) -> None:
    config = replace(echelon.preset("ppo", "CartPole-v1"), **TINY, **{"run.dir": str(tmp_path / "run")})
    result = echelon.train(config, output=io.StringIO())
    assert repr(result) == f"RunResult(status='finished', run_dir={tmp_path / 'run'!r})"


def test_an_evaluation_that_fails_does_not_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(match: Match) -> None:
        raise EnvError("broken")

    monkeypatch.setattr(Match, "step", fail)
    summary, text = train(tmp_path / "run")
    assert summary["status"] == "finished" and summary["evaluation_return_mean"] is None
    assert "the final weights could not be evaluated: evaluator: broken" in text


def test_nothing_is_evaluated_without_an_update(tmp_path: Path) -> None:
    summary, _ = train(tmp_path / "run", **{"stop.steps": 0, "stop.minutes": 1e-9})
    assert summary["status"] == "no_updates" and summary["evaluation_return_mean"] is None


def test_the_best_weights_are_kept_and_found_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    summary, _ = train(run, **{"run.keep_checkpoints": 1, "run.checkpoint_interval_s": 0.0})
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["best", Path(summary["checkpoint"]).name]
    best = read_best(run / "checkpoints")
    assert best == Best(summary["evaluation_return_mean"], summary["env_steps"], 3)
    assert (summary["best_return_mean"], summary["best_steps"]) == (best.return_mean, best.env_steps)
    weights, final = read_weights(weights_path(str(run), "best")), load_weights(run / "weights.safetensors")
    assert weights.keys() == final.keys() and all((weights[name] == final[name]).all() for name in final)
    assert main(["eval", str(run), "--checkpoint", "best", "--episodes", "2", "--json"]) == 0
    score = json.loads(capsys.readouterr().out)
    assert (score["checkpoint"], score["env_steps"]) == ("best", best.env_steps)
    fields = {"run.init_from": str(run / "checkpoints/best"), "evaluation.episodes": 0}
    assert train(tmp_path / "next", **fields)[0]["status"] == "finished"


@pytest.mark.parametrize("earlier", [1e6, -1e6])
def test_a_resumed_run_keeps_better_weights_of_before(tmp_path: Path, earlier: float) -> None:
    run = tmp_path / "run"
    train(run, **{"evaluation.episodes": 2})
    save_best(run / "checkpoints", load_weights(run / "weights.safetensors"), Best(earlier, 7, 2))
    summary = echelon.resume(run, steps=200, output=io.StringIO()).summary
    expected = (1e6, 7) if earlier > 0 else (summary["evaluation_return_mean"], summary["env_steps"])
    assert (summary["best_return_mean"], summary["best_steps"]) == expected
    best = read_best(run / "checkpoints")
    assert best is not None and (best.return_mean, best.env_steps) == expected


def test_best_weights_whose_replacement_was_not_completed_are_restored(tmp_path: Path) -> None:
    """As a crash between the two renames leaves them."""
    train(tmp_path / "run")
    folder = tmp_path / "run/checkpoints"
    best = read_best(folder)
    (folder / "best").rename(folder / f".tmp-{socket.gethostname()}.best")
    assert weights_path(str(tmp_path / "run"), "best") == folder / "best" and read_best(folder) == best


def test_damaged_best_weights_are_replaced(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run)
    (run / "checkpoints/best/state.json").write_text("{}")
    with pytest.raises(ConfigError, match="damaged"):
        read_best(run / "checkpoints")
    output = io.StringIO()
    summary = echelon.resume(run, steps=200, output=output).summary
    assert "The next evaluation replaces it" in output.getvalue()
    assert read_best(run / "checkpoints") == Best(summary["evaluation_return_mean"], summary["env_steps"], 3)


def test_best_weights_alone_are_nothing_to_resume_from(tmp_path: Path) -> None:
    """A run that was killed before its first checkpoint, but after an evaluation, starts again."""
    run = tmp_path / "run"
    train(run)
    for path in (run / "checkpoints").glob("step_*"):
        shutil.rmtree(path)
    words = ["--engine=inline", "--actors=1", "--envs-per-actor=2", "--evaluation.episodes=0", "--network.hidden=8"]
    words += ["--actor.trajectory=8", "--algorithm.minibatches=2", "--algorithm.epochs=1", "--steps=100"]
    assert main(["train", "ppo", "CartPole-v1", f"--run-dir={run}", "--auto-resume", *words]) == 0
    assert (tmp_path / "run.incomplete/checkpoints/best").is_dir() and not (run / "checkpoints/best").exists()
