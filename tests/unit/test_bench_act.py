"""`echelon bench act`: its arguments, a feeder's turns, and small real runs on the CPU."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from echelon.algorithms.model import Model
from echelon.bench.act import NETWORKS, NUM_ACTIONS, ActSetting, Serving, bench_act, default_feeders, table
from echelon.bench.feeder import MEASURE, NUM_SAMPLES, STOP, Feed, Feeder, Tally
from echelon.cli.main import main
from echelon.errors import ConfigError, RunError
from echelon.schema import Spaces
from echelon.transport.act_board import ActBoard
from echelon.transport.batcher import Batcher, BatchRule

FEED = Feed((3,), "float32", rows=2, num_feeders=1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"network": "lstm"}, "network=lstm is not known; there are mlp, cnn"),
        ({"precision": "int8"}, "precision=int8 is not known"),
        ({"batches": (10,), "feeders": 4}, "batch=10 does not divide among 4 feeders"),
        ({"feeders": 0}, "feeders=0 must be at least 1"),
        ({"seconds": 0.0}, "seconds=0 must be above 0"),
    ],
)
def test_a_setting_that_cannot_be_measured_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ActSetting(**changes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "64,many"], "--batch 64,many is not a list of numbers"),
        (["--json", "/nowhere/report.json"], "cannot be written"),
        (["--network", "lstm"], "invalid choice"),
        (["--device", "cpu", "--precision", "bfloat16", "--batch", "8"], "precision=bfloat16 is for a GPU"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "act", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_default_number_of_feeders_divides_the_default_batches() -> None:
    ActSetting(feeders=default_feeders())


def test_a_feeder_needs_no_torch() -> None:
    code = "import sys, echelon.bench.feeder; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_feeder_fills_one_group_while_the_other_waits(shm_dir: Path) -> None:
    board, tally = ActBoard(shm_dir, FEED.layout), Tally(shm_dir, 1)
    tally.phase[0] = MEASURE
    feeder = Feeder({"feed": dataclasses.asdict(FEED), "session": str(shm_dir), "index": 0})
    batcher = Batcher(board, 0, BatchRule(max_wait_us=0.0))
    assert feeder.step(0.0) and board.asked.tolist() == [1, 0]
    first = batcher.next(0.0)
    assert feeder.step(0.0) and board.asked.tolist() == [1, 1]
    assert not feeder.step(0.0)  # the first group has no answer yet
    assert first is not None and first.seats.tolist() == [0]
    batcher.settle(first, 1)
    before = board.observation[0][0].copy()
    assert feeder.step(0.0) and board.asked.tolist() == [2, 1]
    assert (board.observation[0][0] != before).all()
    assert tally.answered[0] == 1 and tally.latencies()[0] > 0
    tally.phase[0] = STOP
    feeder.step(0.0)
    assert feeder.finished
    feeder.close()
    assert (board.incarnation == 0).all()


def test_a_tally_keeps_the_last_latencies(shm_dir: Path) -> None:
    tally = Tally(shm_dir, 2)
    tally.latency_ns[:] = 5
    tally.answered[:] = [3, 2 * NUM_SAMPLES]
    assert len(tally.latencies()) == 3 + NUM_SAMPLES


def check(result: dict[str, Any], batch: int) -> None:
    assert result["batch"] == batch
    assert 0 < result["mean_batch"] <= 2 * batch  # both groups may be due at once
    assert result["actions_per_s"] == pytest.approx(result["rounds_per_s"] * result["mean_batch"])
    assert 0 < result["latency_ms"]["50"] <= result["latency_ms"]["95"]
    assert result["alone"]["actions_per_s"] > 0
    assert 0 < sum(result["server"].values()) <= 1.01
    assert 0 < result["feeders"]["laying"] + result["feeders"]["waiting"] <= 1
    assert result["gpu_ms"] == {}


def test_a_run_measures_every_batch_and_leaves_nothing(shm_dir: Path) -> None:
    setting = ActSetting(
        network="mlp", batches=(4, 8), feeders=2, device="cpu", seconds=0.5, spin_us=20.0, shm_dir=str(shm_dir)
    )
    told: list[str] = []
    report = bench_act(setting, told.append)
    for result, batch in zip(report["results"], (4, 8), strict=True):
        check(result, batch)
    assert len(told) == 2 and "rounds of 4 from 2 feeders" in told[0]
    text = table(report)
    assert "mlp on cpu, float32, 2 feeders" in text and f"{report['results'][1]['actions_per_s']:,.0f}" in text
    assert not list(shm_dir.iterdir())


def test_the_command_writes_its_report(shm_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    options = ["--network", "cnn", "--batch", "2", "--feeders", "1", "--device", "cpu", "--seconds", "0.5"]
    assert main(["bench", "act", *options, "--shm-dir", str(shm_dir), "--json", str(path)]) == 0
    assert "cnn on cpu" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["bench"] == "act" and report["hardware"]["cores"] >= 1
    check(report["results"][0], 2)


def test_a_feeder_that_fails_ends_the_measurement(shm_dir: Path) -> None:
    config, space = NETWORKS["mlp"]
    model = Model(config, Spaces(space, gym.spaces.Discrete(NUM_ACTIONS)))
    setting = ActSetting(network="mlp", batches=(2,), feeders=2, device="cpu", shm_dir=str(shm_dir))
    serving = Serving(setting, model, 2, shm_dir, print)
    serving.feed = dataclasses.replace(serving.feed, dtype="nonsense")
    try:
        with pytest.raises(RunError, match=r"feeder-\d failed: TypeError"):
            serving.fed()
    finally:
        serving.close()


def test_random_observations_fill_their_range() -> None:
    rng = np.random.default_rng(0)
    frames, numbers = np.zeros((64, 64), np.uint8), np.zeros((64, 64), np.float32)
    FEED.fill(frames, rng)
    FEED.fill(numbers, rng)
    assert frames.min() < 5 and frames.max() > 250
    assert 0 <= numbers.min() < 0.05 and 0.95 < numbers.max() <= 1
