"""benchmarks/lag.py: the lag is exact, at lag 0 it is synchronous training, and its statistics are right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import echelon
from echelon.config import replace

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import lag

SMALL = {"actor.envs": "4", "actor.trajectory": "16", "algorithm.epochs": "2", "algorithm.minibatches": "2"}


def job(correction: str, versions: int, steps: int = 640) -> lag.Job:
    return lag.Job("cartpole", correction, versions, 3, steps, SMALL)


def test_the_board_yields_the_weights_of_some_versions_ago() -> None:
    def parts(version: int) -> list[np.ndarray[Any, Any]]:
        return [np.full(3, version, np.float32), np.array(version, np.int64)]

    board, out = lag.DelayedBoard(2, parts(0)), np.zeros(20, np.uint8)
    for version in range(6):
        assert board.newest == version and board.version == max(version - 2, 0)
        assert board.read(out) == board.version
        assert out[:12].view(np.float32).tolist() == [board.version] * 3 and out[12:].view(np.int64) == board.version
        board.publish(parts(version + 1))


def test_without_lag_it_is_synchronous_training(tmp_path: Path) -> None:
    found = lag.run(job(lag.SYNC, 0))
    changes = {"engine": "inline", "stop.steps": 640, "run.dir": str(tmp_path / "run"), "evaluation.episodes": 0}
    trained = echelon.train(replace(lag.config_of(job(lag.SYNC, 0)), **changes))
    assert found["weights_sha256"] == trained.summary["weights_sha256"]
    assert found["curve"][-1][1] == pytest.approx(trained.summary["return_mean"], abs=0.01)
    assert not found["reached"] and found["env_steps"] == 640


def test_lag_is_what_the_learner_sees() -> None:
    without, lagging = (lag.run(job("decoupled", versions)) for versions in (0, 4))
    assert abs(without["metrics"]["kl_lag"]) < 1e-6
    assert lagging["metrics"]["kl_lag"] > 1e-5
    assert lagging["weights_sha256"] != without["weights_sha256"]


def runs(*steps: int, correction: str = "none", versions: int = 4, limit: int = 500) -> list[dict[str, Any]]:
    one = {"task": "cartpole", "correction": correction, "lag": versions}
    return [
        {**one, "seed": seed, "env_steps": min(number, limit), "reached": number < limit, "curve": [(0, 1.0), (9, 2.0)]}
        for seed, number in enumerate(steps)
    ]


def test_ratios_of_medians_have_intervals_and_count_misses() -> None:
    sync = runs(100, 100, 100, correction=lag.SYNC, versions=0)
    same = lag.compare(runs(150, 150, 150), sync)
    assert (same.ratio, same.low, same.high) == (1.5, 1.5, 1.5) and same.text == "1.50 (1.50 to 1.50)"
    wide = lag.compare(runs(*range(100, 300, 10)), sync)
    assert wide.ratio == pytest.approx(1.95) and 1.2 < wide.low < 1.8 < 2.1 < wide.high < 2.8
    few = lag.compare(runs(150, 150, 900), sync)
    assert few.ratio == 1.5 and few.high == 5.0 and few.text == "1.50 (1.50 to 5.00, 1 missed)"
    assert lag.compare(runs(150, 900, 900), sync).text.startswith("≥ 5.00")


def test_a_study_writes_a_report_that_can_be_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "lag.json", tmp_path / "lag.png"
    lags = ["--tasks=cartpole", "--lags=1", "--corrections=vtrace", "--seeds=2", "--limit=300", "--jobs=1"]
    lag.main([*lags, *(word for pair in SMALL.items() for word in ("--set", *pair)), f"--out={report}"])
    shown = capsys.readouterr().out
    assert "| vtrace | ≥ 1.00 (1.00 to 1.00, 2 missed) |" in shown and "2 seeds, 2 missed" in shown
    written = json.loads(report.read_text())
    assert [(one["correction"], one["lag"], one["seed"]) for one in written["runs"]] == [
        *[("sync", 0, 0), ("vtrace", 1, 0), ("sync", 0, 1), ("vtrace", 1, 1)]
    ]
    assert written["settings"]["cartpole"]["actor"]["trajectory"] == 16
    lag.main(["--from", str(report), f"--picture={picture}"])
    assert capsys.readouterr().out == shown and picture.read_bytes().startswith(b"\x89PNG")
