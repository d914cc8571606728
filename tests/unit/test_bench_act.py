"""`echelon bench act`: its arguments, a feeder's turns, and small real runs on the CPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from echelon.bench.act import ActSetting
from echelon.bench.act_feeder import MEASURE, NUM_SAMPLES, STOP, Feed, Feeder, FeederCounts
from echelon.bench.act_server import MeasuredServer, make_model
from echelon.cli.main import main
from echelon.errors import RunError
from echelon.transport.act_board import ActBoard
from echelon.transport.batcher import Batcher, BatchRule

FEED = Feed((3,), "float32", rows=2, num_feeders=1)


def test_the_default_number_of_feeders_divides_the_default_batches() -> None:
    for batch in ActSetting.options()["batch"].default.split(","):
        assert int(batch) % ActSetting(batch=int(batch)).num_feeders == 0


def test_a_feeder_fills_one_group_while_the_other_waits(shm_dir: Path) -> None:
    board, tally = ActBoard(shm_dir, FEED.layout), FeederCounts(shm_dir, 1)
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
    tally = FeederCounts(shm_dir, 2)
    tally.latency_ns[:] = 5
    tally.answered[:] = [3, 2 * NUM_SAMPLES]
    assert len(tally.latencies()) == 3 + NUM_SAMPLES


def test_every_batch_is_measured_and_nothing_is_left(
    shm_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    options = ["--network", "mlp", "--batch", "4,8", "--feeders", "2", "--device", "cpu", "--seconds", "0.5"]
    options += ["--spin-us", "20", "--shm-dir", str(shm_dir), "--json", str(path)]
    assert main(["bench", "act", *options]) == 0
    out, report = capsys.readouterr().out, json.loads(path.read_text())
    setting = ["network", "batches", "feeders", "device", "precision", "seconds", "max_wait_us", "spin_us", "shm_dir"]
    assert list(report) == ["bench", *setting, "hardware", "versions", "results"]
    assert (report["bench"], report["batches"], report["feeders"]) == ("act", [4, 8], 2)
    for result, batch in zip(report["results"], (4, 8), strict=True):
        assert f"mlp on cpu: rounds of {batch} from 2 feeders, 0.5 s" in out
        assert result["batch"] == batch and f"{result['actions_per_s']:,.0f}" in out
        assert 0 < result["mean_batch"] <= 2 * batch  # both groups may be due at once
        assert result["actions_per_s"] == pytest.approx(result["rounds_per_s"] * result["mean_batch"])
        assert 0 < result["latency_ms"]["50"] <= result["latency_ms"]["95"]
        assert set(result["alone"]) == {"actions_per_s", "round_ms"} and result["alone"]["actions_per_s"] > 0
        assert 0 < sum(result["server"].values()) <= 1.01 and result["gpu_ms"] == {}
        assert 0 < result["feeders"]["laying"] + result["feeders"]["waiting"] <= 1
    assert "mlp on cpu, float32, 2 feeders" in out
    assert not list(shm_dir.iterdir())


def test_a_feeder_that_fails_ends_the_measurement(shm_dir: Path) -> None:
    setting = ActSetting(network="mlp", batch=2, feeders=2, device="cpu", shm_dir=str(shm_dir))
    serving = MeasuredServer(setting, make_model(setting), shm_dir, lambda done, total: None)
    serving.feed = dataclasses.replace(serving.feed, dtype="nonsense")
    with pytest.raises(RunError, match=r"feeder-\d failed: TypeError"):
        serving.fed()
    serving.close()


def test_random_observations_fill_their_range() -> None:
    rng = np.random.default_rng(0)
    frames, numbers = np.zeros((64, 64), np.uint8), np.zeros((64, 64), np.float32)
    FEED.fill(frames, rng)
    FEED.fill(numbers, rng)
    assert frames.min() < 5 and frames.max() > 250
    assert 0 <= numbers.min() < 0.05 and 0.95 < numbers.max() <= 1
